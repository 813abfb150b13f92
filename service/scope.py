"""Who may share what of a request with whom. The HTTP side makes this record once for each request (`Server.scope_of`);
all that keeps, counts or shows something of the request takes its view from here and has no rule of its own."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scope:
    """The sender of a request, as keyed hashes that reveal neither keys nor user names nor addresses.

    Only the key is proved, so only the key is a wall. The name is the word of whoever holds the key; where no keys are
    configured anybody can claim any name.
    """

    key: str = ""  # of the API key; "" where none are configured: one scope for all senders
    name: str = ""  # of `safety_identifier`, else `user`, else the sender's address
    separate_names: bool = False  # `prefix_cache: per_client`

    @property
    def owner(self) -> str:
        """Who may read, continue and delete what is stored of a request."""
        return self.key

    @property
    def cache_namespace(self) -> str:
        """The part of the prefix cache, and of any memory of past texts, that a request reads and fills."""
        return f"{self.key}/{self.name}" if self.separate_names else self.key

    def past(self, *, shown: bool) -> str | None:
        """Whose past answers a request reads and adds to; `shown`: whether its client sees what is drafted from them.
        None: no one's, for what is shown must be the client's own, and only a key proves that."""
        return None if shown and not self.key else self.cache_namespace

    @property
    def account(self) -> str:
        """Who is charged: by fairness for tokens, by the learner for samples. Many names gain a key nothing."""
        return self.key or self.name
