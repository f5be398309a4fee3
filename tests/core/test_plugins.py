"""Parts from a user's own module: registered by import, chosen by name, used in every process."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from datetime import UTC, datetime

import pytest

from hospitals import typed
from oneflare.core.files import write_json
from oneflare.nn import bfloat16
from oneflare.nn.bfloat16 import SpeedMeasurement, forget, reference
from shared import ForkedScript, forked

MODULE = '''
import torch
from torch import nn
from oneflare.fusion.base import FUSIONS
from oneflare.fusion.features.sums import CountPrototypes
from oneflare.methods import Method, register
from oneflare.nn.encoders import ENCODERS


@ENCODERS.register("flat")
class Flat(nn.Module):
    """one linear layer on the pixels"""

    def __init__(self, channels, *, dim: int = 12):
        super().__init__()
        self.layer = nn.LazyLinear(dim) if channels is None else nn.Linear(channels * 64, dim)

    def forward(self, x):
        return self.layer(x.flatten(1))


@FUSIONS.register("mine")
class Mine(CountPrototypes):
    """counted prototypes under another name"""


recipe = {"encoder": {"name": "flat"}, "fusions": ["mine", "ensemble"]}
register(Method("own", "a method of the user's", "mine", recipe))
'''


def test_a_module_of_the_user_adds_encoder_fusion_and_method(tmp_path):
    (tmp_path / "parts.py").write_text(MODULE)
    listed = forked("--plugin", "parts", "methods", "--json", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert "own" in [method["name"] for method in json.loads(listed.stdout)]
    words = ("run", "method=own", "epochs=1", "clients=2", "workers=2", "--json", "--quiet", "--out", "run")
    ran = forked("--plugin", "parts", *words, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    content = json.loads(ran.stdout)
    assert content["headline"] == "mine"
    assert content["encoder"]["name"] == "flat"
    again = forked("fuse", "run", "--fusion", "average", "--json", "--quiet", ONEFLARE_PLUGINS="parts", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    own = {(row["kind"], row["name"]) for row in json.loads(listed.stdout) if row.get("module") == "parts"}
    assert own == {("encoder", "flat"), ("fusion", "mine")}
    without = forked("fuse", "run", "--fusion", "iffi", cwd=tmp_path)
    assert without.returncode == 2
    (line,) = without.stderr.splitlines()
    assert "run was made with the plugin parts, which is not loaded; oneflare --plugin parts" in line


def test_a_file_is_a_plugin_too(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "rule.py").write_text(MODULE)
    words = ("run", "method=own", "epochs=1", "clients=2", "workers=2", "--json", "--quiet", "--out", "run")
    ran = forked("--plugin", "mine/rule.py", *words, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["headline"] == "mine"
    for name, reason in (("none.py", "no such file"), ("json.py", "another module is called json")):
        if name == "json.py":
            (tmp_path / name).write_text(MODULE)
        wrong = forked("--plugin", f"../{name}", "methods", cwd=tmp_path / "mine")
        assert wrong.returncode == 2
        (line,) = wrong.stderr.splitlines()
        assert reason in line


SPAWNED = """
import sys, types
import oneflare.simulation.engines.local as local
local.sys = types.SimpleNamespace(platform="another")   # where workers are spawned
from torch import nn
import oneflare
if __name__ == "__main__":
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 12))
    small = {"data": {"train_size": 64}, "epochs": 1, "clients": 2, "workers": 2}
    result = oneflare.run(method="own", encoder=encoder, out="run", **small)
    print(result.headline, result.content.encoder["kind"])
"""


def test_spawned_workers_know_the_parts_and_the_modules_of_the_user(tmp_path):
    (tmp_path / "parts.py").write_text(MODULE)
    (tmp_path / "script.py").write_text(SPAWNED)
    done = ForkedScript(str(tmp_path / "script.py"), cwd=tmp_path, ONEFLARE_PLUGINS="parts").wait()
    assert done.stdout.strip() == "mine Sequential", done.stderr


def test_broken_parts_are_told_what_they_break():
    from torch import nn

    from oneflare.data.sources import SOURCES
    from oneflare.errors import OneFlareError
    from oneflare.fusion import FUSIONS, QUIET, Fusion, build_fusion
    from oneflare.methods import METHODS, Method, register
    from oneflare.nn.encoders import ENCODERS
    from oneflare.nn.feature_maps import FEATURE_MAPS
    from oneflare.objective import CONTROLLERS, Controller
    from oneflare.testing import (
        check_controller,
        check_encoder,
        check_feature_map,
        check_fusion,
        check_method,
        check_source,
    )

    class Away(Controller):
        def loss(self, local, align, progress):
            return local - 5 * align

    class Number(Controller):
        def loss(self, local, align, progress):
            return 3.0

    class Images(nn.Module):
        def __init__(self, channels):
            super().__init__()

        def forward(self, x):
            return x

    class Dice:
        dim = 3

        def __init__(self, channels, size):
            pass

        def __call__(self, images):
            import torch

            return torch.rand(len(images), 3)

    def nothing(config):
        return None

    class NoFusion:
        pass

    class Bare(Fusion):
        def fuse(self, uploads, workspace=QUIET):
            return build_fusion({"name": "average"}).fuse(uploads).model

    class Hoarder(Fusion):
        single_network = True

        def fuse(self, uploads, workspace=QUIET):
            self.last = build_fusion({"name": "average"}).fuse(uploads)
            return self.last

    cases = [
        (CONTROLLERS, Away, check_controller, "alignment counts -5 times the local loss, but 0 is recorded"),
        (CONTROLLERS, Number, check_controller, "loss() returns float, not a tensor"),
        (CONTROLLERS, NoFusion, check_controller, "is not a Controller; derive it from"),
        (ENCODERS, Images, check_encoder, "must return features of shape (batch, d)"),
        (FEATURE_MAPS, Dice, check_feature_map, "two maps with one seed give different features"),
        (SOURCES, nothing, check_source, "returns NoneType, not an oneflare.Dataset"),
        (FUSIONS, NoFusion, check_fusion, "is not a Fusion; derive it from"),
        (FUSIONS, Bare, check_fusion, "fuse() returns SingleModel; return Fused(model)"),
        (FUSIONS, Hoarder, check_fusion, "fuse() sets last on the fusion; return it in Fused instead"),
    ]
    for registry, part, check, message in cases:
        if registry is CONTROLLERS and part is NoFusion:
            part = type("NoController", (), {"__init__": lambda self, facts: None})
        registry.register("broken")(part)
        try:
            with pytest.raises((AssertionError, OneFlareError)) as caught:
                check("broken")
            assert message in str(caught.value)
        finally:
            del registry._entries["broken"]
    register(Method("broken", "names a fusion that is not there", "mine", {"fusions": ["nothing"]}))
    try:
        with pytest.raises(OneFlareError, match="unknown fusion 'nothing'"):
            check_method("broken")
    finally:
        del METHODS["broken"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("absent", None, "plugin absent: No module named 'absent'"),
        ("broken", "1/0", "plugin broken cannot be imported: division by zero"),
        (
            "twice",
            "from oneflare.fusion.base import FUSIONS, Fusion\n"
            "@FUSIONS.register('average')\nclass Average(Fusion):\n    def fuse(self, uploads, workspace): ...\n",
            "fusion 'average' is registered twice",
        ),
        (
            "earlier",
            "from oneflare.fusion import FUSIONS, Fusion\n"
            "@FUSIONS.register('mine')\nclass Mine(Fusion):\n    def fuse(self, uploads): ...\n",
            "earlier.Mine: fuse must take (self, uploads, workspace) and return Fused(model)",
        ),
    ],
)
def test_a_module_that_does_not_import_is_one_line(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / f"{name}.py").write_text(text)
    failed = forked("--plugin", name, "run", "epochs=1", cwd=tmp_path)
    assert failed.returncode == 2
    assert message in failed.stderr
    assert len(failed.stderr.strip().splitlines()) == 1


@pytest.fixture
def remembered(tmp_path, monkeypatch):
    """A machine that remembers an absurd figure, so that nothing is measured until somebody asks for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    figure = SpeedMeasurement(99.0, 0.0, datetime.now(UTC).isoformat(), "2.0", "a processor", reference().label)
    write_json(tmp_path / "oneflare" / "bfloat16.json", {bfloat16._key(reference()): dataclasses.asdict(figure)})
    yield
    forget()


def test_doctor_tells_what_is_there(tmp_path, capsys, monkeypatch, remembered):
    monkeypatch.setenv("ONEFLARE_DATA", str(tmp_path))
    code, out, err = typed(capsys, "doctor", "--json")
    assert code == 0, err
    content = json.loads(out)
    assert content["data"] == {"cifar10": False, "cifar100": False, "svhn": False, "tiny-imagenet": False}
    assert 0 < content["free_bytes"] <= shutil.disk_usage(".").total
    monkeypatch.delenv("ONEFLARE_DATA")
    _, read, _ = typed(capsys, "doctor")
    assert "digits" in read
    assert re.search(r"bfloat16 .*measured \d{4}-\d\d-\d\d with torch", read)
    assert "set ONEFLARE_DATA to a folder with" in " ".join(read.split())


def test_doctor_measures_bfloat16_again_when_asked(capsys, remembered):
    def told(*words):
        _, out, _ = typed(capsys, "doctor", "--json", *words)
        return json.loads(out)["bfloat16"][0]["speedup"]

    assert told() == 99.0
    assert told("--again") < 50
    assert told() < 50


def test_verbose_shows_where_an_error_was_raised(tmp_path):
    plain = forked("run", "alpah=1", cwd=tmp_path)
    loud = forked("--verbose", "run", "alpah=1", cwd=tmp_path)
    assert plain.returncode == loud.returncode == 2
    assert "Traceback" not in plain.stderr
    assert "Traceback" in loud.stderr
