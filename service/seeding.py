"""Prompts that the server answers itself while nobody asks, so that a drafter is made before its first user comes."""

import asyncio
import itertools
import logging
from collections import deque

from service.engine.requests import GenerationRequest, SamplingParams
from service.errors import RequestError
from service.runtime import Runtime
from service.scope import Scope

logger = logging.getLogger(__name__)

_GLANCE_SECONDS = 0.25
ANSWER_TOKENS = 256
"""Of a bootstrap prompt, at most: as far as learning looks back."""
_SCOPE = Scope(name="bootstrap prompts")


async def answer_seeds(runtime: Runtime) -> None:
    """Answer the seeds, one at a time and only while there is no other request, until learning collects no more. What
    somebody's request breaks off is asked again later."""
    await runtime.wait_until_loaded()
    waiting, answered = deque(runtime.seeds), 0
    if not waiting:
        return
    numbers = itertools.count()
    while waiting and await _is_collecting(runtime):
        await asyncio.sleep(_GLANCE_SECONDS)
        if runtime.state != "ready":
            return
        if not runtime.num_open and await _answered(runtime, waiting[0], next(numbers)):
            waiting.popleft()
            answered += 1
    logger.info("answered %d of %d bootstrap prompts", answered, len(runtime.seeds))


async def _is_collecting(runtime: Runtime) -> bool:
    try:
        status = await runtime.ask_adaptation(lambda control: control.status())
    except RequestError:
        return False
    return status.phase == "collecting"


async def _answered(runtime: Runtime, prompt: tuple[int, ...], number: int) -> bool:
    """Whether nobody else asked meanwhile."""
    request = GenerationRequest(
        request_id=f"bootstrap-{number}",
        prompt=prompt,
        sampling=SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, seed=0),
        scope=_SCOPE,
    )
    try:
        with runtime.generate(request) as stream:
            async for _ in stream:
                if runtime.num_open > 1:
                    return False
    except RequestError as error:
        logger.warning("a bootstrap prompt is left out: %s", error)
    return True
