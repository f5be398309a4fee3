from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from torch import nn

import oneflare
from conftest import SERVERS, TINY
from oneflare.client.observer import Observer
from oneflare.core.layers import merge
from oneflare.data import given_data, load
from oneflare.errors import ConfigError, DataError, RunError
from oneflare.methods import METHODS
from oneflare.methods.resolve import resolve
from oneflare.simulation.files import RunFiles
from oneflare.simulation.stages import fuse_run, read_experiment, read_result, run_experiment
from shared import figures, small_map


def start(folder, *layers, **options):
    return run_experiment(resolve(TINY, *layers), folder, **options)


@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_runs(method, tmp_path):
    result = start(tmp_path / "run", {"method": method, "epochs": 1}, small_map(method, 8))
    assert result.headline in result.fusions
    for row in result.fusions.values():
        assert all(np.isfinite(row[key]) for key in ("balanced_accuracy", "worst_class", "calibration_error"))
    test = load(resolve(TINY).data).test
    assert result.accuracy == float((result.model().predict(test.images) == test.labels).double().mean())


def test_the_folder_holds_what_the_design_names(tiny_run):
    files = RunFiles(tiny_run)
    for path in (files.experiment, files.partition, files.result, files.diagnostics):
        assert path.exists(), path
    for client in range(3):
        for path in (files.client(client).upload, files.client(client).trace, files.client(client).summary):
            assert path.exists(), path
        assert files.client(client).snapshot(1).exists()
    for fusion in read_result(tiny_run).fusions:
        assert files.model(fusion).exists()
        assert files.metrics(fusion).exists()
    assert not list(tiny_run.rglob("*.partial"))
    table = json.loads(files.partition.read_text())["table"]
    assert np.array(table).sum() == 200


def test_the_result_has_what_the_command_line_promises(tiny_run):
    content = read_result(tiny_run).to_dict()
    assert {"method", "seed", "partition", "fusions", "clients", "cost", "diagnostics"} <= set(content)
    assert {"train_seconds", "upload_bytes", "peak_memory_bytes"} <= set(content["cost"])
    for row in content["clients"]:
        assert {"samples", "classes", "lambda_raw_max", "lambda_effective_final"} <= set(row)
    for row in content["fusions"].values():
        assert row["history"][-1] == {"epoch": 2, "accuracy": row["accuracy"]}
        assert len(row["history"]) == 2


def test_same_settings_same_figures_for_any_number_of_workers(tmp_path, tiny_run):
    for workers in (1, 2, 3):
        result = start(tmp_path / str(workers), {"method": "flare", "fusions": SERVERS, "workers": workers})
        assert figures(result) == figures(read_result(tiny_run))


def test_a_complete_run_is_not_repeated(tiny_run):
    class Loud(Observer):
        def begin(self, *arguments):
            pytest.fail("began again")

    again = start(tiny_run, {"method": "flare", "fusions": SERVERS}, observer=Loud())
    assert again.complete_before
    assert again.to_dict() == read_result(tiny_run).to_dict()


def test_a_folder_belongs_to_one_experiment(tmp_path):
    start(tmp_path / "run", {"epochs": 1})
    with pytest.raises(RunError, match=r"another experiment \(train.lr was 0.05, now 0.1\); choose another --out"):
        start(tmp_path / "run", {"epochs": 1, "train.lr": 0.1})


def test_fusions_are_added_without_training(tmp_path):
    folder = tmp_path / "run"
    start(folder, {"fusions": "feature_mean", "epochs": 1})
    uploads = {path: path.stat().st_mtime_ns for path in folder.rglob("upload.safetensors")}
    result = fuse_run(folder, [{"name": "iffi"}])
    assert set(result.fusions) == {"feature_mean", "iffi"}
    more = start(folder, {"fusions": "feature_mean,average", "epochs": 1})
    assert "average" in more.fusions
    assert uploads == {path: path.stat().st_mtime_ns for path in folder.rglob("upload.safetensors")}
    direct = start(tmp_path / "direct", {"fusions": "iffi", "epochs": 1})
    assert direct.fusions["iffi"].accuracy == result.fusions["iffi"].accuracy


def test_a_fusion_with_other_options_is_made_anew(tmp_path):
    folder = tmp_path / "run"
    median = {"name": "median_prototypes"}
    trimmed = median | {"kind": "trimmed"}
    first = start(folder, {"fusions": [trimmed], "epochs": 1}).fusions["median_prototypes"]
    assert first.options["kind"] == "trimmed"
    made = RunFiles(folder).metrics("median_prototypes").stat().st_mtime_ns
    fuse_run(folder, [median])  # a name alone is the run's own
    assert RunFiles(folder).metrics("median_prototypes").stat().st_mtime_ns == made
    other = fuse_run(folder, [median | {"kind": "median"}]).fusions["median_prototypes"]
    assert other.options["kind"] == "median"
    again = start(folder, {"fusions": [trimmed], "epochs": 1})
    assert again.fusions["median_prototypes"].options == first.options
    assert again.fusions["median_prototypes"].accuracy == first.accuracy


def test_a_failed_client_is_left_out_and_named(tmp_path):
    """Client 0's pixels make its loss overflow; the federation goes on without it and says so."""
    dataset = load(resolve(TINY).data)
    images = dataset.train.images.float() / 255
    images[:40] = float("inf")
    broken = oneflare.Dataset(
        "broken", type(dataset.train)(images, dataset.train.labels), dataset.test, dataset.classes, dataset.image, False
    )
    warnings = []

    class Listening(Observer):
        def warn(self, text):
            warnings.append(text)

    owners = (np.arange(40), np.arange(40, 120), np.arange(120, 200))
    result = start(tmp_path / "run", dataset=dataclasses.replace(broken, owners=owners), observer=Listening())
    assert result.content.fused_clients == (1, 2)
    assert result.content.clients[0].status == "failed"
    assert any("client 0 is left out" in text for text in warnings)


def test_a_tampered_upload_is_left_out_and_named(tmp_path):
    folder = tmp_path / "run"
    start(folder, {"fusions": "feature_mean", "epochs": 1})
    upload = RunFiles(folder).client(1).upload
    content = bytearray(upload.read_bytes())
    content[-1] ^= 1
    upload.write_bytes(content)
    warnings = []

    class Listening(Observer):
        def warn(self, text):
            warnings.append(text)

    fuse_run(folder, [{"name": "average"}], Listening())
    assert len(warnings) == 1
    assert "does not match its digest" in warnings[0]


def test_no_usable_upload_is_an_error(tmp_path):
    with pytest.raises(RunError, match="no client produced a usable upload"):
        start(tmp_path / "run", {"train.lr": 1e30, "train.clip": 1e30})


def test_empty_clients_are_left_out(tmp_path):
    result = start(tmp_path / "run", {"clients": 60, "alpha": 0.02, "epochs": 1, "fusions": "feature_mean"})
    empty = [row.client for row in result.content.clients if row.status == "empty"]
    assert empty
    assert not set(empty) & set(result.content.fused_clients)
    assert len(result.content.fused_clients) + len(empty) == 60


def test_two_runs_on_one_folder(tmp_path):
    import os

    from oneflare.core.files import exclusive

    with exclusive(tmp_path / "run"), pytest.raises(RunError, match=f"in use by process {os.getpid()}"):
        start(tmp_path / "run")


def test_folders_that_are_no_runs(tmp_path):
    for function in (read_experiment, read_result):
        with pytest.raises(RunError, match="is not a run folder"):
            function(tmp_path)
    (tmp_path / "experiment.yaml").write_text(resolve(TINY).to_yaml())
    with pytest.raises(RunError, match="is not finished"):
        read_result(tmp_path)
    with pytest.raises(RunError, match="is not finished"):
        fuse_run(tmp_path, [{"name": "iffi"}])


class OwnEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 24)

    def forward(self, x):
        return self.layer(x.flatten(1))


SMALL = merge(
    {key: TINY[key] for key in ("partition", "train", "workers")}, {"epochs": 1, "fusions": "count_prototypes"}
)


def arrays(number=120, seed=0):
    generator = np.random.default_rng(seed)
    return generator.integers(0, 255, (number, 8, 8), dtype=np.uint8), generator.integers(0, 4, number)


def test_python_api_with_own_arrays_and_encoder(tmp_path):
    torch.manual_seed(0)
    encoder = OwnEncoder()
    result = oneflare.run("train.lr=0.01", data=arrays(), encoder=encoder, out=tmp_path / "run", **SMALL)
    model, test = result.model(encoder=OwnEncoder()), given_data(arrays(), None).test
    assert result.accuracy == float((model.predict(test.images) == test.labels).double().mean())
    with pytest.raises(RunError, match="pass it"):
        result.model()
    assert read_experiment(tmp_path / "run").encoder["kind"] == "OwnEncoder"
    with pytest.raises(RunError, match="given in Python"):
        fuse_run(tmp_path / "run", [{"name": "average"}])


@pytest.mark.parametrize("encoder", ["custom", {"name": "custom", "kind": "OwnEncoder", "digest": "0" * 64}])
def test_an_encoder_of_another_session_is_asked_for_again(tmp_path, encoder):
    with pytest.raises(ConfigError, match="give it again as encoder=module"):
        start(tmp_path / "run", {"encoder": encoder})


def test_python_api_with_one_pair_of_arrays_per_client(tmp_path):
    clients = [arrays(30, seed) for seed in range(3)]
    result = oneflare.run(
        data=clients, test=arrays(40, 9), out=tmp_path / "run", encoder={"name": "conv4", "width": 4}, **SMALL
    )
    assert result.content.partition.sizes == (30, 30, 30)
    assert result.content.data.test == 40


def test_a_public_split_of_arrays_has_no_owner(tmp_path):
    small = {"encoder": {"name": "conv4", "width": 4}, **SMALL}
    result = oneflare.run("data.public=20", data=arrays(), out=tmp_path / "run", **small)
    assert sum(result.content.partition.sizes) == 76
    assert (result.content.data.train, result.content.data.public) == (76, 20)
    with pytest.raises(ConfigError, match=r"data\.public: images that have owners cannot be set aside"):
        oneflare.run("data.public=20", data=[arrays()], test=arrays(40, 9), out=tmp_path / "owned", **small)


def test_python_api_with_a_torch_data_set(tmp_path):
    x, y = arrays()
    dataset = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    result = oneflare.run(data=dataset, out=tmp_path / "run", encoder={"name": "conv4", "width": 4}, **SMALL)
    assert result.content.data.train == 96


def test_python_api_mistakes(tmp_path):
    with pytest.raises(ConfigError, match="test= goes with data given as arrays"):
        oneflare.run(data="digits", test=arrays())
    with pytest.raises(DataError, match="needs held-out images"):
        oneflare.run(data=[arrays()])
    with pytest.raises(DataError, match="is not understood"):
        oneflare.run(data=3.5)
    with pytest.raises(AttributeError, match="no attribute 'rnu'"):
        oneflare.rnu  # noqa: B018


def test_settings_may_be_corrected_after_images_that_could_not_be_read(tmp_path):
    """The remedy of an error must work with the same command and the same folder."""
    folder = tmp_path / "run"
    with pytest.raises(DataError, match=r"needs data\.path"):
        start(folder, {"data": {"name": "folder"}})
    assert start(folder).folder == folder
    with pytest.raises(RunError, match="holds another experiment"):
        start(folder, {"train.lr": 0.01})
