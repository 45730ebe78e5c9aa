"""`transformers serve --continuous-batching` of a converted Llama, asked over HTTP by OpenAI's client."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import pathlib
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from transformers import PreTrainedModel

import kda_layers
from kda_layers import convert_attention
from tests.modeling import stock_models
from tests.modeling.models import stock

MISSING = [name for name in ("fastapi", "uvicorn", "openai", "pydantic") if importlib.util.find_spec(name) is None]
needs_serving = pytest.mark.skipif(bool(MISSING), reason=f"needs kda_layers[serve]: no {', '.join(MISSING)}")
pytestmark = [pytest.mark.slow, needs_serving]
try:
    kda_layers.serving.enable_continuous_batching()
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

LETTERS = "abcdefghijklmnopqrstuvwxyz ."
CHAT = "{% for m in messages %}{{ m.content }}.{% endfor %}"
TUTORIAL = pathlib.Path(__file__).parents[1] / "docs/tutorials/serve.md"
PATIENCE = 60.0  # seconds until something is taken to hang


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "this takes too long"
        time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def save_checkpoint(folder: pathlib.Path, m: PreTrainedModel) -> None:
    """Save a model and a tokenizer of letters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: i for i, letter in enumerate(("<pad>", *LETTERS))}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    letters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", clean_up_tokenization_spaces=False)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    m.generation_config.do_sample = False
    m.save_pretrained(folder)


@functools.cache
def expected(folder: pathlib.Path, prompt: str, new: int) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    m, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    out = m.generate(ids, max_new_tokens=new, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


class Server:
    """A server in a thread of this process."""

    def __init__(self, folder: pathlib.Path, blocks: int):
        from transformers.cli.serve import Serve

        self.folder, self.port = folder, free_port()
        self.serve = Serve(
            str(folder), continuous_batching=True, device="cpu", host="127.0.0.1", port=self.port,
            cb_num_blocks=blocks, cb_max_batch_tokens=256, non_blocking=True, log_level="error",
        )  # fmt: skip
        until(lambda: self.serve.server.started)

    def client(self) -> Any:
        import openai

        return openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=PATIENCE
        )

    def complete(self, prompt: str, new: int = 12) -> str:
        answer = self.client().completions.create(model=str(self.folder), prompt=prompt, max_tokens=new)
        return answer.choices[0].text

    def stream(self, prompt: str, new: int = 12) -> Any:
        return self.client().completions.create(model=str(self.folder), prompt=prompt, max_tokens=new, stream=True)

    @property
    def scheduler(self) -> Any:
        return self.serve._generation_state._cb_manager.scheduler

    @property
    def slots(self) -> dict[str, list[int]]:
        return self.scheduler.cache.cache_allocators["linear_attention"].block_table


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(path, convert_attention(stock("llama", torch.float32), "1:1"))
    return path


@pytest.fixture(scope="module")
def server(folder: pathlib.Path) -> Iterator[Server]:
    running = Server(folder, blocks=6)
    yield running
    running.serve.kill_server()


def test_completions_and_chat(server: Server) -> None:
    want = expected(server.folder, "a short story.", 12)
    assert server.complete("a short story.") == want
    chat = server.client().chat.completions.create(
        model=str(server.folder), messages=[{"role": "user", "content": "a short story"}], max_tokens=12
    )
    assert chat.choices[0].message.content == want
    assert chat.usage.completion_tokens == 12


def test_streaming(server: Server) -> None:
    chunks = [chunk.choices[0].text for chunk in server.stream("once upon a time") if chunk.choices]
    assert "".join(chunks) == expected(server.folder, "once upon a time", 12)
    assert len(chunks) > 2


def test_two_clients_at_once(server: Server) -> None:
    """Both are in the same steps, one of them streaming, and each gets its own tokens."""
    prompts, new, seen = ("the first", "and the second one"), 150, set()

    def streamed(prompt: str) -> str:
        parts = []
        for chunk in server.stream(prompt, new):
            parts.append(chunk.choices[0].text if chunk.choices else "")
            seen.add(len(server.slots))
        return "".join(parts)

    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(streamed, prompts))
    assert got == [expected(server.folder, prompt, new) for prompt in prompts]
    assert 2 in seen


def test_more_clients_than_slots(server: Server) -> None:
    """With all slots taken, requests wait, and all are answered."""
    prompts = [f"{letter} is for" for letter in LETTERS[:16]]
    server.complete("warm up", 1)
    most = server.scheduler.cache.num_sectors // 2  # a request needs a sector for its slot and one for its keys
    assert most < len(prompts)
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(server.complete, prompt, 40) for prompt in prompts]
        taken = 0
        while not all(answer.done() for answer in answers):
            taken = max(taken, len(server.slots))
    assert [a.result() for a in answers] == [expected(server.folder, prompt, 40) for prompt in prompts]
    assert 1 < taken <= most
    until(lambda: not server.slots)


def test_a_client_that_disconnects(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slot is free again; the others' answers are as before."""
    server.complete("warm up", 1)
    schedule = server.scheduler.schedule_batch

    def slowly(*args: Any, **options: Any) -> Any:
        time.sleep(0.005)  # a step of a larger model: a tiny one would be done before the server looks for the client
        return schedule(*args, **options)

    monkeypatch.setattr(server.scheduler, "schedule_batch", slowly)
    stream = server.stream("to be continued", 1500)
    next(iter(stream))
    (request,) = server.scheduler.active_requests.values()
    stream.close()
    until(lambda: not server.slots)
    assert len(request.generated_tokens) < 1500
    assert not server.scheduler.has_pending_requests()
    assert server.complete("a short story.") == expected(server.folder, "a short story.", 12)


def test_a_request_that_is_too_long(server: Server) -> None:
    """It fails with a message that says what to do, streaming or not, and the server goes on."""
    import openai

    for ask in (server.complete, server.stream):
        with pytest.raises(openai.BadRequestError) as error:
            ask("too long", 10**6)
        assert "shorten it (max_tokens), or raise num_blocks" in str(error.value.body)
    assert server.complete("a short story.") == expected(server.folder, "a short story.", 12)
    assert not server.slots


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (dict(temperature=1e-42, do_sample=True), 400),  # logits would overflow, and NaN cannot be sampled
        (dict(num_return_sequences=100_000, do_sample=True), 200),  # of each later request
        (dict(eos_token_id=[1, None]), 500),  # would be the default of later requests
    ],
)
def test_a_first_request_of_odd_options(server: Server, fields: dict[str, Any], status: int) -> None:
    """The server starts its engine with the options of the first request: only how to sample is taken from it."""
    import openai

    server.serve._generation_state.shutdown()
    body = {"generation_config": json.dumps(fields | {"max_new_tokens": 3})}
    got = 200
    try:
        server.client().completions.create(model=str(server.folder), prompt="abc", extra_body=body)
    except openai.APIStatusError as error:
        got = error.status_code
    assert got == status
    assert len(server.complete("a short story.")) == 12
    server.serve._generation_state.shutdown()
    assert server.complete("a short story.") == expected(server.folder, "a short story.", 12)


def test_a_server_of_latent_attention(tmp_path: pathlib.Path) -> None:
    """It loads transformers' own layers, and swaps them; without them it could not serve the model."""
    save_checkpoint(tmp_path, stock_models.build("kimi_linear", vocab_size=len(LETTERS) + 1))
    server = Server(tmp_path, blocks=20)
    try:
        want = expected(tmp_path, "a short story.", 12)
        assert server.complete("a short story.") == want
        assert "".join(c.choices[0].text for c in server.stream("a short story.") if c.choices) == want
        model = server.serve._generation_state._cb_manager._cb.model
        assert {type(m).__name__ for m in stock_models.swapped_layers_of(model).values()} == {
            "FastKimiLinearDeltaAttention"
        }
    finally:
        server.serve.kill_server()


def test_a_server_without_enabling(folder: pathlib.Path) -> None:
    """It finds the model's class, and says what continuous batching needs."""
    code = f"""
import kda_layers
from transformers.cli.serving.model_manager import ModelManager
(loaded,) = ModelManager(device="cpu", force_model={str(folder)!r}).loaded_models.values()
print(type(loaded.model).__name__)
try:
    loaded.model.init_continuous_batching()
except RuntimeError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert "KDALlamaForCausalLM\n" in run.stdout, run.stderr
    assert "needs kda_layers.serving.enable_continuous_batching(), called once before it" in run.stdout


def blocks_of_tutorial(language: str) -> list[str]:
    return [block.partition("```")[0] for block in TUTORIAL.read_text().split(f"```{language}\n")[1:]]


def installed_by_the_tutorial() -> set[str]:
    """Names of the distributions that its install line brings."""
    (line,) = [block for block in blocks_of_tutorial("bash") if "pip install" in block]
    extra = re.fullmatch(r"pip install '\.\[(\w+)\]' .*\n", line)[1]  # type: ignore[index]
    project = tomllib.loads((TUTORIAL.parents[2] / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"][extra]]
    names, found = [Requirement(r) for r in wanted], set()
    while names:
        requirement = names.pop()
        name = canonicalize_name(requirement.name)
        for of in ("", *requirement.extras):
            if f"{name}[{of}]" in found:
                continue
            found.add(f"{name}[{of}]")
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                for text in importlib.metadata.requires(name) or ():
                    more = Requirement(text)
                    if more.marker is None or more.marker.evaluate({"extra": of}):
                        names.append(more)
    return {entry.partition("[")[0] for entry in found}


ONLY_INSTALLED = """
import sys
class Installed:
    def __init__(self, finders, hidden):
        self.finders, self.hidden = finders, hidden
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.hidden:
            return None
        found = (f.find_spec(name, path, target) for f in self.finders if hasattr(f, "find_spec"))
        return next((spec for spec in found if spec is not None), None)
    def find_distributions(self, *args, **kwargs):
        import importlib.metadata
        return importlib.metadata.MetadataPathFinder.find_distributions(*args, **kwargs)
sys.meta_path[:] = [Installed(list(sys.meta_path), {hidden!r})]
"""


@functools.cache
def only_installed() -> str:
    """Code by which a process finds no package but those of the tutorial's install line."""
    kept = installed_by_the_tutorial() | {"kda-layers"}
    packages = importlib.metadata.packages_distributions()
    hidden = {top for top, of in packages.items() if not kept & {canonicalize_name(name) for name in of}}
    assert {"pytest", "peft"} & set(packages) <= hidden
    return ONLY_INSTALLED.format(hidden=hidden)


@pytest.mark.parametrize("language", ["python", "bash"])
def test_the_tutorial(folder: pathlib.Path, language: str) -> None:
    """Its servers and its client run as they are printed, in processes of their own, with what it installs."""
    port = free_port()
    if language == "python":
        code = blocks_of_tutorial("python")[0].replace('"my-model"', repr(str(folder)))
        command = [sys.executable, "-c", only_installed() + code.replace("port=8000", f"port={port}, device='cpu'")]
    else:
        line = blocks_of_tutorial("bash")[1].replace("\\\n", "").replace("my-model", str(folder))
        _, option, code, *options = shlex.split(line.replace("8000", str(port)))
        command = [sys.executable, option, only_installed() + code, *options, "--device", "cpu"]
    client_code = blocks_of_tutorial("python")[1].replace('"my-model"', repr(str(folder)))
    client_code = only_installed() + client_code.replace(":8000", f":{port}")
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    running = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]
    lines: list[str] = []
    threading.Thread(target=lambda: lines.extend(running.stdout), daemon=True).start()
    try:
        until(lambda: running.poll() is not None or any("Uvicorn running" in line for line in lines))
        client = subprocess.run([sys.executable, "-c", client_code], timeout=PATIENCE, **pipes)  # type: ignore
        assert client.returncode == 0, client.stdout + "".join(lines)
        assert client.stdout.strip("\n") == expected(folder, "Once upon a time", 40)
        status = pathlib.Path(f"/proc/{running.pid}/status")
        if status.exists():  # Linux
            assert int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) < 1.5 * 2**20  # type: ignore[index]
    finally:
        running.terminate()
        running.wait(PATIENCE)


def test_the_tutorial_without_a_server(folder: pathlib.Path) -> None:
    code = only_installed() + blocks_of_tutorial("python")[2].replace('"my-model"', repr(str(folder)))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert [len(json.loads(line)) for line in run.stdout.splitlines() if line.startswith("[")] == [20, 20], run.stderr
