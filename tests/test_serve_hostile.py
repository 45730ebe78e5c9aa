"""`transformers serve` of models with KDA layers, in a process of its own, under requests that nobody should send.

No request stops the server or keeps others waiting: after each, an ordinary one gets its tokens.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from kda_layers import convert_attention
from tests.modeling.models import build, stock
from tests.test_serve import PATIENCE, expected, free_port, pytestmark, save_checkpoint, until  # noqa: F401

MODELS = {
    "llama": lambda: convert_attention(stock("llama", torch.float32), "1:1"),  # keys and values bound a request
    "kda": lambda: build("kda", torch.float32),  # a request of any length fits
}
SERVER = """
import kda_layers
from transformers.cli.serve import Serve

kda_layers.serving.enable_continuous_batching()
Serve({folder!r}, continuous_batching=True, device="cpu", host="127.0.0.1", port={port}, cb_num_blocks=40,
      cb_max_batch_tokens=256)
"""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Answer = tuple[int, str]


class Server:
    def __init__(self, folder: pathlib.Path, code: str = SERVER):
        self.folder, self.port = folder, free_port()
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.log = open(folder / "log", "w")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-c", code.format(folder=str(folder), port=self.port)],
            env=environment, stdout=self.log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        until(lambda: self.process.poll() is not None or self.listens())
        assert self.process.poll() is None, (folder / "log").read_text()

    def listens(self) -> bool:
        with contextlib.suppress(OSError):
            return self.ask("GET", "/health")[0] == 200
        return False

    def connect(self, timeout: float = PATIENCE) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        with contextlib.closing(self.connect()) as connection:
            connection.request(method, path, body, {"Content-Type": "application/json"} | headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")

    def post(self, path: str = COMPLETIONS, request_id: str | None = None, **fields: Any) -> Answer:
        headers = {} if request_id is None else {"X-Request-ID": request_id}
        return self.ask("POST", path, json.dumps({"model": str(self.folder)} | fields).encode(), **headers)

    def check(self, prompt: str = "a short story.", new: int = 8) -> None:
        """Ask an ordinary request."""
        status, answer = self.post(prompt=prompt, max_tokens=new)
        assert status == 200, answer
        assert json.loads(answer)["choices"][0]["text"] == expected(self.folder, prompt, new)

    def leave(self, stage: str, wait: float = 0.0, **fields: Any) -> None:
        """Close the connection of a request at a stage."""
        body = json.dumps({"model": str(self.folder), "prompt": "abc", "stream": stage == "stream"} | fields).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        sent = {"connected": b"", "head": head[:40].encode(), "body": head.encode() + body[: len(body) // 2]}
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as s:
            s.sendall(sent.get(stage, head.encode() + body))
            if stage == "stream":
                s.recv(1)
            time.sleep(wait)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        self.log.close()


@pytest.fixture(scope="module", params=MODELS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp(request.param)
    save_checkpoint(folder, MODELS[request.param]())
    running = Server(folder)
    yield running
    running.stop()


REFUSED: dict[str, dict[str, Any]] = {  # fields -> 400
    "empty prompt": dict(prompt="", max_tokens=3),
    "no prompt": dict(max_tokens=3),
    "empty prompt, streaming": dict(prompt="", stream=True),
    "huge max_tokens": dict(prompt="abc", max_tokens=10**18),
    "huge max_tokens, streaming": dict(prompt="abc", max_tokens=10**18, stream=True),
    "list of prompts": dict(prompt=["abc", "d"]),
    "token ids": dict(prompt=[1, 2]),
    "another model": dict(prompt="abc", model="another"),
}
STRANGE: dict[str, dict[str, Any]] = {  # any answer
    "negative max_tokens": dict(max_tokens=-3),
    "no tokens": dict(max_tokens=0),
    "no tokens, streaming": dict(max_tokens=0, stream=True),
    "max_tokens is text": dict(max_tokens="x"),
    "max_tokens is a list": dict(max_tokens=[1]),
    "max_tokens is a fraction": dict(max_tokens=2.5),
    "max_tokens is infinite": dict(max_tokens=float("inf")),
    "prompt is null": dict(prompt=None),
    "prompt is no Unicode": dict(prompt="\ud800"),
    "prompt has unknown letters": dict(prompt="\x00ä€" * 20, max_tokens=3),
    "seed is text": dict(seed="x"),
    "seed is huge": dict(seed=2**70),
    "temperature is text": dict(temperature="x"),
    "temperature is no number": dict(temperature=float("nan")),
    "generation_config is no JSON": dict(generation_config="{"),
    "generation_config is unknown": dict(generation_config='{"x": 1}', max_tokens=3),
    "eos_token_id is null": dict(generation_config='{"eos_token_id": [1, null]}'),
    "unknown field": dict(nonsense=1),
    "no messages": dict(path=CHAT, messages=[]),
    "messages is a number": dict(path=CHAT, messages=3),
    "messages of no role": dict(path=CHAT, messages=[{}]),
    "responses": dict(path="/v1/responses", input=[]),
    "systemone": dict(path="/v1/systemone"),
    "transcriptions": dict(path="/v1/audio/transcriptions"),
}
BODIES = {
    "empty": b"",
    "invalid UTF-8": b"\xff\xfe{",
    "malformed": b'{"prompt": ',
    "a list": b"[]",
    "deep": b"[" * 5000,
}


def complete(fields: dict[str, Any]) -> dict[str, Any]:
    return fields if "path" in fields else {"prompt": "abc", "max_tokens": 3} | fields


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_alone(server: Server, name: str) -> None:
    if server.folder.name.startswith("kda") and name.startswith("huge"):
        assert "2147483647 tokens" in server.post(**REFUSED[name])[1]
    assert server.post(**REFUSED[name])[0] == 400
    server.check()


@pytest.mark.parametrize("name", STRANGE)
def test_a_strange_request_harms_no_other(server: Server, name: str) -> None:
    assert server.post(**complete(STRANGE[name]))[0] in (200, 400, 422, 500)
    server.check()


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_is_no_request(server: Server, name: str) -> None:
    assert server.ask("POST", COMPLETIONS, BODIES[name])[0] in (400, 422)
    server.check()


def test_one_token(server: Server) -> None:
    server.check("a", 1)


def test_a_prompt_of_80_000_tokens(server: Server) -> None:
    """It is longer than a cache of keys and values, and is read in chunks where there are only states."""
    status, answer = server.post(prompt="abcd" * 20_000, max_tokens=2)
    if server.folder.name.startswith("kda"):
        assert status == 200, answer
        assert json.loads(answer)["usage"]["prompt_tokens"] == 80_000
    else:
        assert status == 400
        assert "a request of 80000 prompt tokens and 2 new ones is longer than the cache, which has room for" in answer
        assert "raise num_blocks" in answer
    server.check()


def test_a_short_request_passes_a_long_prompt(server: Server) -> None:
    """The long one is read over many steps, and gets its tokens, too."""
    prompt, order = "once upon a time. " * 500, []
    assert len(prompt) > 30 * 256

    def long() -> None:
        server.check(prompt, 2)
        order.append("long")

    thread = threading.Thread(target=long)
    expected(server.folder, prompt, 2)
    thread.start()
    time.sleep(0.1)
    while thread.is_alive() and len(order) < 3:
        server.check("a short story.", 1)
        order.append("short")
    thread.join()
    assert order[0] == "short"
    assert "long" in order


@pytest.mark.parametrize("stage", ["connected", "head", "body", "sent", "stream"])
@pytest.mark.parametrize("wait", [0.0, 0.02])
def test_clients_that_leave(server: Server, stage: str, wait: float) -> None:
    """Far more than there are slots, and each would decode for minutes."""
    for _ in range(30):
        server.leave(stage, wait, max_tokens=9000)
    before = time.monotonic()
    server.check()
    assert time.monotonic() - before < PATIENCE / 4


def test_a_request_id_in_use_is_refused(server: Server) -> None:
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: server.post(prompt="abc", max_tokens=60, request_id="same"), range(6)))
    statuses = sorted(status for status, _ in answers)
    assert statuses[0] == 200
    assert set(statuses[1:]) <= {200, 400}
    assert all("x-request-id must not be that of a request in progress" in a for status, a in answers if status == 400)
    server.check()


def test_many_at_once(server: Server) -> None:
    """A random mixture of the above from 12 clients, and ordinary requests among them."""
    choice = random.Random(0)
    tasks: list[Any] = [lambda f=f: server.post(**f) for f in REFUSED.values()]
    tasks += [lambda f=f: server.post(**complete(f)) for f in STRANGE.values()]
    tasks += [lambda body=body: server.ask("POST", COMPLETIONS, body) for body in BODIES.values()]
    tasks += [lambda stage=stage: server.leave(stage, max_tokens=9000) for stage in ("head", "body", "sent", "stream")]
    expected(server.folder, "once upon a time", 20)  # loading a model is not safe among threads
    tasks += [lambda: server.check(), lambda: server.check("once upon a time", 20)] * 6
    tasks += [lambda: server.post(prompt="abc", max_tokens=1, stream=True)] * 6
    with ThreadPoolExecutor(12) as pool:
        done = [pool.submit(task) for task in itertools.islice(iter(lambda: choice.choice(tasks), None), 150)]
    for future in done:
        future.result()
    server.check()


def test_reset_loads_the_model_again(server: Server) -> None:
    assert server.post("/reset")[0] == 200
    server.check()


def test_clients_that_leave_are_no_errors(server: Server) -> None:
    """Their calls end quietly."""
    server.leave("sent", 0.02, max_tokens=9000)
    server.check()
    assert "No response returned" not in (server.folder / "log").read_text()
