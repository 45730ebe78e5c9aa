"""`transformers serve` of models with KDA layers: bad requests get a 400, and requests end with their HTTP calls.

This file is imported by `enable_continuous_batching` alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import importlib
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from kda_layers.modeling.checks import is_stock
from kda_layers.modeling.serving.continuous_batching import wraps
from kda_layers.modeling.serving.engine import check_prompt
from kda_layers.modeling.serving.state_allocator import check_config, has_states
from kda_layers.modeling.swap.swap import swap_attention

logger = logging.getLogger("kda_layers")
# What a request can ask of the engine for all requests, as the engine samples for all alike.
SHARED = ("do_sample", "temperature", "top_k", "top_p")
COLDEST = 1e-20  # logits divided by less may overflow, and NaN stops the engine

_call: ContextVar[_Call | None] = ContextVar("kda_layers_call", default=None)


@wraps("CBGenerateManager.init_cb")
def share_sampling(init_cb: Callable[..., None], self: Any, model: Any, gen_config: Any) -> None:
    """Start the engine with the generation config of the first request.

    Only `SHARED` is taken from it: other fields, such as a bad `eos_token_id`, would fail all later requests. Return
    when the engine has its cache, by which requests are checked. KDA layers of transformers' own are swapped: nobody
    else can, as the server loads the model.
    """
    if self._cb is not None or not has_states(model.config.get_text_config()):
        return init_cb(self, model, gen_config)
    check_config(model.config.get_text_config())  # before layers are changed
    if any(map(is_stock, model.modules())):
        logger.warning("swapped the KDA layers of %s: %s", type(model).__name__, ", ".join(swap_attention(model)))
    shared = copy.deepcopy(model.generation_config)
    for name in SHARED:
        setattr(shared, name, getattr(gen_config, name))
    if shared.do_sample and shared.temperature is not None and not shared.temperature >= COLDEST:
        raise _bad_request(f"temperature must be 0 or at least {COLDEST}, got {shared.temperature}")
    init_cb(self, model, shared)
    engine: Any = self._cb
    # The loop pauses once its cache is made. If it fails there, the request says so.
    with contextlib.suppress(RuntimeError), engine.pause():
        pass


@wraps("CBGenerateManager.generate_streaming", "CBGenerateManager.generate_non_streaming")
def check_first(
    generate: Callable[..., Any], self: Any, model: Any, processor: Any, inputs: Any, config: Any, request_id: str,
    **more: Any,
) -> Any:  # fmt: skip
    """Answer 400 if the request would fail."""
    if has_states(model.config.get_text_config()) and getattr(self._cb, "batch_processor", None) is not None:
        if request_id in self._cb.output_router.result_handlers:
            raise _bad_request(f"x-request-id must not be that of a request in progress, got {request_id!r}")
        try:
            check_prompt(self._cb.batch_processor.cache, inputs["input_ids"], config.max_new_tokens)
        except ValueError as error:
            raise _bad_request(str(error)) from error
        if (call := _call.get()) is not None:
            call.begin(self._cb, request_id)
    return generate(self, model, processor, inputs, config, request_id=request_id, **more)


@wraps("build_server")
def end_with_calls(build_server: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Add `Calls` to the application."""
    app = build_server(*args, **kwargs)
    app.add_middleware(Calls)
    return app


class Calls:
    """ASGI middleware: a request of the engine ends with the HTTP call that it came from, whenever its client leaves.

    transformers cancels a request whose client leaves a stream that has begun. Others it computes to their end, for
    nobody, in slots that later requests wait for.
    """

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        call = _Call(receive, send)
        _call.set(call)
        task = asyncio.ensure_future(self.app(scope, call.messages.get, call.send))
        watch = asyncio.ensure_future(call.watch(task))
        try:
            await task
        except (asyncio.CancelledError, RuntimeError):  # Starlette's, of a call without an answer
            if not call.gone:
                raise
        finally:
            task.cancel()
            watch.cancel()
            call.end()


class _Call:
    def __init__(self, receive: Any, send: Any):
        self.receive, self._send = receive, send
        self.messages: asyncio.Queue[Any] = asyncio.Queue(1)
        self.begun: list[tuple[Any, str]] = []  # engines, ids of requests
        self.gone = self.answered = False

    async def send(self, message: Any) -> None:
        self.answered |= message["type"] == "http.response.body" and not message.get("more_body", False)
        await self._send(message)

    async def watch(self, task: asyncio.Future[None]) -> None:
        """Pass messages of the client on until it is gone; end the call then, if it has begun a request."""
        while (message := await self.receive())["type"] != "http.disconnect":
            await self.messages.put(message)
        self.gone = not self.answered
        if self.gone and self.begun:
            task.cancel()
        await self.messages.put(message)

    def begin(self, engine: Any, request_id: str) -> None:
        if self.gone:
            raise asyncio.CancelledError
        self.begun.append((engine, request_id))

    def end(self) -> None:
        for engine, request_id in self.begun:
            if engine.output_router.result_handlers.pop(request_id, None) is not None:  # not finished
                engine.cancel_request(request_id)


def _bad_request(message: str) -> Exception:
    return importlib.import_module("fastapi").HTTPException(status_code=400, detail=message)
