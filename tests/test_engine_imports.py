"""The plug-ins in fresh processes, as engines load them: what they import, replace, say and refuse.

The engines are small packages laid out as the wheels of vLLM 0.33.0 and SGLang 0.5.23, with their logging, their
loading of plug-ins and a function or class for each that we replace; the wheels themselves where they are at hand.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kda_layers.engines import ENVIRONMENT_VARIABLE, sglang, vllm, vllm_layer
from tests.engine_wheels import wheel

ROOT = Path(__file__).parents[1]
ENTRY_POINTS = """[vllm.general_plugins]
kda_layers = kda_layers.engines.vllm:register
[sglang.srt.plugins]
kda_layers = kda_layers.engines.sglang:register
"""
# As vllm/logger.py configures it, and as vllm/plugins/__init__.py loads plug-ins; this package may also be installed.
VLLM = """
import logging.config, sys
stream = {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"}
logger = {"handlers": ["vllm"], "level": "INFO", "propagate": False}
logging.config.dictConfig(
    {"version": 1, "disable_existing_loggers": False, "handlers": {"vllm": stream}, "loggers": {"vllm": logger}}
)
def load():
    from importlib.metadata import entry_points
    for plugin in {p.value: p for p in entry_points(group="vllm.general_plugins")}.values():
        try:
            register = plugin.load()
        except Exception:
            logging.exception("Failed to load plugin %s", plugin.name)
        register()
"""
# As sglang/srt/plugins/__init__.py, where the exceptions of a plug-in are logged.
SGLANG = """
import logging
def load():
    from importlib.metadata import entry_points
    for plugin in {p.value: p for p in entry_points(group="sglang.srt.plugins")}.values():
        try:
            plugin.load()()
        except Exception:
            logging.exception("Failed to execute general plugin: %s", plugin.name)
"""
KIMI_LAYER, K3_LAYER, GLM_LAYER, LING_LAYER = vllm.LAYERS


def path(module: str) -> str:
    return f"{module.replace('.', '/')}.py"


def functions(module: str) -> str:
    return "".join(f"def {name}(): ...\n" for name in vllm.FUNCTIONS[module])


def layer(module: str) -> str:
    """A layer of vLLM, and what registering ours calls."""
    name, arguments, _ = vllm_layer.LAYERS[module]
    text = f"class {name}:\n  @classmethod\n  def register_oot(cls, ours): cls.ours = ours\n"
    text += f"  def _forward(self, {', '.join(arguments)}): ...\n"
    return f"{text}def eager_break_during_capture(f): return f\ndef direct_register_custom_op(**_): ...\n"


FILES = {
    "vllm": {
        "vllm/__init__.py": VLLM,
        "vllm/models/kimi_k3/__init__.py": "raise ImportError('a broken model')",
        path(f"{vllm.KIMI}.__init__"): "from .ops import *",
        path(f"{vllm.KIMI}.ops"): functions(vllm.KIMI),
        path(f"{vllm.GLM}.__init__"): functions(vllm.GLM),
        path(vllm.LING): f"class FusedRMSNormGated: ...\ndef fused_kda_gate(): ...\n{functions(vllm.LING)}",
        **{path(name): f"from {module} import *\n{layer(name)}" for name, module in vllm.LAYERS.items()},
        # Kimi-Linear's imports them in every step.
        path(KIMI_LAYER): f"def step():\n  from {vllm.KIMI} import fused_recurrent_kda\n{layer(KIMI_LAYER)}",
    },
    "sglang": {
        "sglang/__init__.py": SGLANG,
        path(sglang.MODULE): f"class {sglang.CLASS}:\n  def target_verify(self): ...\n",
        "sglang/srt/layers/attention/linear/kda_backend.py": f"from {sglang.MODULE} import {sglang.CLASS}",
    },
}


class Engine:
    """A package of an engine in a folder."""

    def __init__(self, folder: Path, name: str, version: str, files: dict[str, str]) -> None:
        self.folder, self.name = folder, name
        for file, text in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text)
        for package, text in ((f"{name}-{version}", ""), ("kda_layers_of_test-0.1.0", ENTRY_POINTS)):
            distribution, _, its_version = package.partition("-")
            info = folder / f"{package}.dist-info"
            info.mkdir(exist_ok=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {its_version}\n")
            (info / "entry_points.txt").write_text(text)

    def run(self, code: str, asked: str | None = None) -> subprocess.CompletedProcess[str]:
        """Load the plug-ins in a fresh process, then run `code`."""
        code = f"import sys, importlib, inspect, {self.name}\n{self.name}.load()\n{code}"
        environment = os.environ | {
            "PYTHONPATH": f"{self.folder}:{ROOT}", ENVIRONMENT_VARIABLE: self.name if asked is None else asked,
        }  # fmt: skip
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT)

    def lines(self, code: str, asked: str | None = None) -> list[str]:
        done = self.run(code, asked)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()


@pytest.fixture
def vllm_engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path, "vllm", vllm.TESTED, FILES["vllm"])


@pytest.fixture
def sglang_engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path, "sglang", sglang.TESTED, FILES["sglang"])


# Of a function that ours is with another default, too.
WHOSE = "print([getattr(f, 'func', f).__module__.rpartition('.')[2] for f in map(inspect.unwrap, ({names}))])"


# ---------------------------------------------------------------- vLLM


def test_registering_imports_nothing_of_vllm(vllm_engine: Engine) -> None:
    code = "print([m for m in sys.modules if m.startswith('vllm.')])"
    assert vllm_engine.lines(code) == ["[]"]


@pytest.mark.slow
def test_functions_are_replaced_as_a_model_imports_them(vllm_engine: Engine) -> None:
    """A model that cannot be imported stops no other; the log says what is replaced, and once what serves."""
    names = "m.chunk_kda, m.fused_recurrent_kda, m.fused_recurrent_kda_fwd, m.fused_kda_gate"
    code = f"import {LING_LAYER} as m\nfrom {vllm.LING} import chunk_kda\n{WHOSE.format(names=names)}\n"
    code += "import torch\nt = torch.zeros(1, 3, 1, 16)\nfor _ in range(2):\n"
    code += "  m.chunk_kda(q=t, k=t, v=t, g=t, beta=t[..., 0], cu_seqlens=torch.tensor([0, 3]), initial_state=None,\n"
    code += "    output_final_state=False, use_qk_l2norm_in_kernel=True, safe_gate=False, lower_bound=None)\n"
    code += "print(chunk_kda is m.chunk_kda)"
    replaced = ", ".join(vllm.FUNCTIONS[vllm.LING])
    assert vllm_engine.lines(code) == [
        f"kda_layers replaces {replaced} of {vllm.LING}",
        "['vllm_functions', 'vllm_functions', 'vllm_functions', 'kda']",
        f"kda_layers serves chunk_kda of {vllm.LING}",
        "True",
    ]
    assert vllm_engine.lines(f"import {LING_LAYER} as m\n{WHOSE.format(names=names)}", asked="sglang") == [
        "['kda', 'kda', 'kda', 'kda']"
    ]


@pytest.mark.slow
def test_layers_are_registered_as_their_modules_are_imported(vllm_engine: Engine) -> None:
    """And nothing else is imported for them; one that has another core stays, and the log says so."""
    names = [vllm_layer.LAYERS[module][0] for module in (KIMI_LAYER, LING_LAYER)]
    code = f"import {KIMI_LAYER} as m, {LING_LAYER} as n\n"
    code += f"print(m.{names[0]}.ours.__name__, n.{names[1]}.ours.__name__)\n"
    code += f"print({K3_LAYER!r} in sys.modules, {vllm.KIMI!r} in sys.modules, 'torch.cuda' in sys.modules)"
    assert vllm_engine.lines(code)[1:] == [f"KDALayers{names[0]} KDALayers{names[1]}", "False False True"]
    file = vllm_engine.folder / path(KIMI_LAYER)
    file.write_text(file.read_text().replace("g1, g2", "gates"))
    assert vllm_engine.lines(f"import {KIMI_LAYER} as m\nprint(hasattr(m.{names[0]}, 'ours'))") == [
        f"kda_layers has no layer for {KIMI_LAYER}.{names[0]}, whose core takes mixed_qkv, gates, beta, core_attn_out: "
        "its functions are replaced",
        "False",
    ]


@pytest.mark.slow
def test_functions_are_replaced_where_they_have_been_imported(vllm_engine: Engine) -> None:
    """Also in the package's own module, which warming up imports from; registering again changes nothing."""
    (vllm_engine.folder / "vllm/models/kimi_k3/__init__.py").write_text("")
    imports = f"import {KIMI_LAYER}, {K3_LAYER} as m, {vllm.KIMI}.ops as ops\n"
    code = f"{imports}first = m.fused_recurrent_kda\nvllm.load()\n"
    code += (
        f"{WHOSE.format(names='m.fused_recurrent_kda, ops.fused_recurrent_kda')}\nprint(first is m.fused_recurrent_kda)"
    )
    after = vllm_engine.lines(code)
    assert after[1:] == ["['vllm_functions', 'vllm_functions']", "True"]
    before = vllm_engine.folder / "vllm" / "__init__.py"
    before.write_text(f"{VLLM.replace('def load', 'def load_now')}\ndef load():\n  {imports}  load_now()\n")
    assert vllm_engine.lines(f"{imports}{code}") == after


@pytest.mark.slow
def test_a_worker_that_is_spawned_replaces_them_too(vllm_engine: Engine) -> None:
    names = "m.fused_recurrent_kda, m.chunk_kda_with_fused_gate"
    work = f"import inspect, vllm; vllm.load(); import {GLM_LAYER} as m; {WHOSE.format(names=names)}"
    (vllm_engine.folder / "worker.py").write_text(f"def work():\n  {work}\n")
    code = "import worker, multiprocessing\np = multiprocessing.get_context('spawn').Process(target=worker.work)\n"
    found = vllm_engine.lines(f"{code}p.start(); p.join(); sys.exit(p.exitcode)")
    assert found[-1] == "['vllm_functions', 'vllm_functions']"


def test_a_served_model_whose_functions_have_moved_names_them(vllm_engine: Engine) -> None:
    """Others are served on."""
    shutil.rmtree(vllm_engine.folder / vllm.GLM.replace(".", "/"))
    (vllm_engine.folder / path(GLM_LAYER)).write_text("")  # it imports them from elsewhere
    done = vllm_engine.run(f"import {LING_LAYER} as m\nprint(inspect.unwrap(m.chunk_kda).__name__)\nimport {GLM_LAYER}")
    assert done.stdout.splitlines()[-1] == "chunk"
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: kda_layers cannot serve {GLM_LAYER}: vLLM {vllm.TESTED} has no {vllm.GLM}, whose functions it "
        f"called in vLLM {vllm.TESTED}: use that version, or leave KDA_LAYERS_ENGINES empty"
    )


def test_a_function_that_is_gone_is_named(vllm_engine: Engine) -> None:
    """Kimi-Linear imports the norm of Ling's module, so that the function is no reason to stop."""
    file = vllm_engine.folder / path(vllm.LING)
    file.write_text(file.read_text().replace("def chunk_kda()", "def chunk_kda_2()"))
    code = f"from {vllm.LING} import FusedRMSNormGated, fused_recurrent_kda as f\nprint(inspect.unwrap(f).__name__)"
    assert vllm_engine.lines(code) == [
        f"kda_layers does not serve {vllm.LING}.chunk_kda, which vLLM {vllm.TESTED} lacks",
        f"kda_layers replaces fused_recurrent_kda, fused_recurrent_kda_fwd of {vllm.LING}",
        "recurrent",
    ]


def test_another_vllm_is_told_of(tmp_path: Path) -> None:
    """Its version, and the layers that it lacks; without any it does not start."""
    layers = [path(name) for name in vllm.LAYERS]
    other = Engine(tmp_path, "vllm", "0.41.0", {f: t for f, t in FILES["vllm"].items() if f != layers[3]})
    assert other.lines("") == [
        f"kda_layers was written for vLLM {vllm.TESTED}; vLLM 0.41.0 is not tested",
        f"kda_layers does not serve the models of {LING_LAYER}, which vLLM 0.41.0 lacks",
    ]
    for file in layers[:3]:
        (tmp_path / file).unlink()
    done = other.run("")
    assert done.returncode
    assert f"RuntimeError: KDA_LAYERS_ENGINES names vllm, but vLLM 0.41.0 has none of {KIMI_LAYER}" in done.stderr


def test_vllms_wheel_logs_what_is_served() -> None:
    """With its own logger, configured as its workers do before they load plug-ins."""
    folder = wheel("vllm")
    code = "import sys, vllm.logger\nvllm.logger._configure_vllm_root_logger()\nbefore = set(sys.modules)\n"
    code += "from kda_layers.engines import vllm as plugin\n"
    code += "plugin.register()\nprint([m for m in set(sys.modules) - before if m.startswith('vllm')])\n"
    code += "plugin.logger.info('kda_layers serves f of m')\n"
    environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", ENVIRONMENT_VARIABLE: "vllm"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    modules, served = done.stdout.splitlines()
    assert modules == "[]"
    assert "INFO" in served
    assert served.endswith("kda_layers serves f of m")


# ---------------------------------------------------------------- SGLang

BACKEND = "sglang.srt.layers.attention.linear.kda_backend"
# As sglang/srt/utils/common.py configures it, after the plug-ins.
LOGGING = """import logging
logging.basicConfig(level=logging.INFO, format='%(message)s', stream=sys.stdout, force=True)
logging.getLogger('kda_layers').setLevel('WARNING')  # of the operator's own messages
"""


def test_sglangs_class_is_replaced_as_it_is_imported(sglang_engine: Engine) -> None:
    code = f"print([m for m in sys.modules if m.startswith('sglang.')])\n{LOGGING}"
    code += f"from {BACKEND} import {sglang.CLASS} as k\nsglang.load()\nprint(k.__name__, k.__mro__[2].__name__)\n"
    code += "import torch\nt, i = torch.zeros(1, 3, 1, 16), torch.tensor\nfor _ in range(2):\n  k().extend(t, t, t, t, "
    code += "t[..., 0], ssm_states=t.new_zeros(2, 1, 16, 16), cache_indices=i([1]), query_start_loc=i([0, 3]))\n"
    assert sglang_engine.lines(code) == [
        "[]",
        f"kda_layers replaces {sglang.CLASS} of {sglang.MODULE}",
        f"KDALayersKernel {sglang.CLASS}",
        "kda_layers serves extend of KDA layers",
    ]
    code = f"from {BACKEND} import {sglang.CLASS} as k\nprint(k.__name__)"
    assert sglang_engine.lines(code, asked="vllm") == [sglang.CLASS]


def test_sglangs_wheel_loads_our_class(tmp_path: Path) -> None:
    """By its own loader of plug-ins, as a subclass of its own class, where what these import is installed."""
    Engine(tmp_path, "sglang", sglang.TESTED, {})  # the entry points
    code = "import logging, sys\nlogging.basicConfig(level=logging.INFO, format='%(message)s', stream=sys.stdout)\n"
    code += "from sglang.srt.plugins import load_plugins\nload_plugins()\n"
    code += f"print({sglang.MODULE!r} in sys.modules)\nfrom {sglang.MODULE} import {sglang.CLASS} as k\nk()\n"
    code += "print(k.__name__, [c.__name__ for c in k.__mro__[2:4]], k.supports_track_state_snapshot)\n"
    environment = os.environ | {
        "PYTHONPATH": f"{tmp_path}:{wheel('sglang')}:{ROOT}", ENVIRONMENT_VARIABLE: "sglang",
        "SGLANG_PLUGINS": "kda_layers",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path)
    missing = re.findall(r"^ModuleNotFoundError: No module named '((?!sglang|kda_layers)[^']*)'$", done.stderr, re.M)
    if missing:
        pytest.skip(f"SGLang imports {missing[-1]}, which is not installed")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    replaced = f"kda_layers replaces {sglang.CLASS} of {sglang.MODULE}"
    start = lines.index("False")
    assert "Executed general plugin: kda_layers" in lines[:start]
    assert [line for line in lines[start:] if "kda_layers" in line or "KDA" in line] == [
        replaced, f"KDALayersKernel ['{sglang.CLASS}', 'LinearAttnKernelBase'] True"
    ]  # fmt: skip
    assert "Failed" not in done.stdout


@pytest.mark.parametrize("broken", ["module", "class", "variable"])
def test_what_is_wrong_stops_sglang(broken: str, sglang_engine: Engine) -> None:
    """Though it only logs exceptions of plug-ins."""
    file = sglang_engine.folder / path(sglang.MODULE)
    asked, seam = "sglang", sglang.MODULE
    if broken == "module":
        file.unlink()
    elif broken == "class":
        file.write_text(f"class {sglang.CLASS}2: ...")
        seam = f"{sglang.MODULE}.{sglang.CLASS}"
    else:
        asked = "sglnag"
    done = sglang_engine.run(f"print('loaded')\nimport {BACKEND}\nprint('served')", asked)
    assert done.returncode == 1
    assert done.stdout == ("loaded\n" if broken == "class" else ""), "only a KDA model imports its class"
    words = f"names sglang, but SGLang {sglang.TESTED} has no {seam}: use SGLang {sglang.TESTED}, or leave the variable"
    assert ("must name engines of sglang, vllm, got sglnag" if broken == "variable" else words) in done.stderr
    assert "Failed to execute" not in done.stderr
