"""Learning beside serving on a CUDA device: a stream of its own, and what is handed over to it.

Serving computes on a stream of higher priority, so that an update fills what a step leaves idle. The only place where
tensors of serving enter learning; what goes back, goes through `DrafterWeights`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from drafters.feedback import Marks, QueryFeedback

LOW_PRIORITY = 0
"""The lowest there is; serving takes -1."""


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Compute on a stream that gives way to serving, behind what was asked for until now; nothing changes on a CPU."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device, priority=LOW_PRIORITY)
    stream.wait_stream(torch.cuda.current_stream(device))  # which may still fill the copies that are trained
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


def received(feedback: QueryFeedback, device: torch.device) -> QueryFeedback:
    """A finished query, safe to be read by the calling thread's stream, on the device that learns."""
    if feedback.ready is None:
        return feedback
    feedback.ready.synchronize()
    marks = Marks(*(_taken(getattr(feedback.marks, name), device) for name in Marks.__slots__))
    return replace(
        feedback,
        features=_taken(feedback.features, device),
        top_ids=_taken(feedback.top_ids, device),
        top_logprobs=_taken(feedback.top_logprobs, device),
        marks=marks,
        ready=None,
    )


def _taken(value: Tensor, device: torch.device) -> Tensor:
    """Its memory must not be given to another tensor of serving before this stream has read it."""
    value.record_stream(torch.cuda.current_stream(value.device))
    return value.to(device)
