"""The templates: built, installed into an environment of their own, tested there, and served through."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
import venv
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import ArceeConfig, ArceeForCausalLM

from tests.features.images import made
from tests.pace import far

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
TEMPLATE = EXAMPLES / "plugin_template"
FAMILY = EXAMPLES / "model_template"
TIMEOUT_S = 120
ASKED = """
import json, sys
from callboard import LLM, SamplingParams

content = [{"type": "image", "image": "picture.png"}, {"type": "text", "text": "Say it."}]
config = {"plugins": json.loads(sys.argv[1]), "kv": {"num_pages": 64}, "device": {"kind": "cpu"}}
with LLM("checkpoint", config=config, progress=False) as llm:
    messages = [[{"role": "user", "content": content}]]
    (answer,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    print(answer.usage.prompt_tokens, len(answer.token_ids))
"""


def run(python: Path, *arguments: str, cwd: Path) -> str:
    environment = {**os.environ, "COLUMNS": "200", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        [str(python), *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=far(TIMEOUT_S),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment that has the templates' wheels, and all that this one has.  No network."""
    root = tmp_path_factory.mktemp("template")
    left_out = shutil.ignore_patterns("build", "*.egg-info")
    projects = [str(shutil.copytree(one, root / one.name, ignore=left_out)) for one in (TEMPLATE, FAMILY)]
    offline = ("--no-index", "--no-deps", "--quiet")
    build = ("-m", "pip", "wheel", *projects, "--no-build-isolation", *offline, "-w", str(root))
    run(Path(sys.executable), *build, cwd=root)
    wheels = [str(one) for one in root.glob("*.whl")]
    assert len(wheels) == len(projects)
    venv.create(root / "env", with_pip=False)
    python = root / "env" / "bin" / "python"
    (packages,) = (root / "env" / "lib").glob("python*/site-packages")
    # Not a plain path: the .pth files of editable installs in that folder are to count as well.
    (packages / "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    run(Path(sys.executable), "-m", "pip", "--python", str(python), "install", *wheels, *offline, cwd=root)
    return python


def test_it_is_installed_tested_listed_and_served_through(environment: Path, tmp_path: Path) -> None:
    shutil.copytree(TEMPLATE / "tests", tmp_path / "tests")
    assert "10 passed" in run(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=tmp_path)
    listed = run(environment, "-m", "callboard", "plugins", "--set", "plugins.attention=watched", cwd=tmp_path)
    (line,) = [line for line in listed.splitlines() if "attention.watched" in line]
    assert "callboard-template 0.1.0" in line
    assert line.startswith("* "), "chosen"
    assert "cannot run here" not in line
    said = run(
        environment,
        *("-m", "callboard", "generate", "def add(a, b):", "--max-tokens", "8", "--temperature", "0"),
        *("--log-level", "info", "--set", "plugins.eviction=aged_lfu", "--set", "plugins.attention=watched"),
        *("--set", 'plugins.options={"attention.watched"={every=10}}', "--set", "device.kind=cpu"),
        cwd=tmp_path,
    )
    assert "plugin attention.watched (callboard-template 0.1.0): right on a trial" in said
    assert "callboard_template.watched: call 10, layer" in said
    assert "def add(a, b):\n" in said


def test_pictures_are_read_by_a_packages_encoder(environment: Path, tmp_path: Path) -> None:
    directory = made.make("llava", tmp_path / "checkpoint")
    save_file({"projection": torch.randn(made.TEXT["hidden_size"], 12)}, directory / "patches.safetensors")
    (tmp_path / "picture.png").write_bytes(made.picture(50, 31))
    options = {"encoder.patches": {"sides": 5, "pixels": 2}}
    said = run(environment, "-c", ASKED, json.dumps({"encoder": "patches", "options": options}), cwd=tmp_path)
    words = len(["<s>", "<user>", "<end>", "<assistant>", "newline"]) + len("Say it.")
    assert said.splitlines()[-1] == f"{words + 5 * 5} 8"


SIZES: dict[str, Any] = {"vocab_size": 259, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
PROMPT = list(range(5, 25))


def test_a_family_from_a_wheel_passes_the_kit_and_answers_over_http(environment: Path, tmp_path: Path) -> None:
    shutil.copytree(FAMILY / "tests", tmp_path / "tests")
    assert "3 passed" in run(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=tmp_path)
    torch.manual_seed(0)
    reference = ArceeForCausalLM(ArceeConfig(**SIZES, **HEADS, initializer_range=0.2)).eval()
    reference.save_pretrained(tmp_path / "checkpoint")
    prompt = torch.tensor([PROMPT])
    expected = reference.generate(prompt, do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0)
    command = [environment, "-m", "callboard", "serve", str(tmp_path / "checkpoint"), "--port", "0"]
    for setting in ('plugins.models=["arcee"]', "model.tokenizer=none", "model.dtype=float32", "kv.num_pages=64"):
        command += ["--set", setting]
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(
            [*command, "--set", "device.kind=cpu"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert server.stdout is not None
        said = ""
        while (found := re.search(r"http://127\.0\.0\.1:\d+", said)) is None:
            line = server.stdout.readline()
            assert line, (tmp_path / "log").read_text()
            said += line
        body = {"model": "checkpoint", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{found[0]}/v1/completions",
            json.dumps(body | {"return_token_ids": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=far(30)) as response:
            answer = json.load(response)
    finally:
        server.terminate()
        server.communicate(timeout=far(30))
    assert answer["choices"][0]["token_ids"] == expected[0, len(PROMPT) :].tolist()
