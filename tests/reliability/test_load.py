"""Many uploads at once: none is lost, none that is bad gets in, and the server's memory stays within bounds."""

from __future__ import annotations

from pathlib import Path

import pytest
from hostile import honest_uploads, mutants
from measure import peak_growth
from record import record

from crowd import charter_of, upload_of
from oneflare.federation.charter import FILE
from oneflare.federation.coordinator import fuse_federation
from oneflare.federation.intake import take_in
from shared import oneflare


def crowd(folder: Path, members: int, hostile: int) -> dict:
    """A folder of honest and hostile files; returns what the server made of it and its peak memory."""
    charter = charter_of()
    charter.write(folder / "federation" / FILE)
    inbox = folder / "inbox"
    inbox.mkdir()
    for number in range(members):
        upload_of(charter, inbox / f"{number:04d}.safetensors", f"m{number:04d}")
    for number, (_, _, content) in enumerate(mutants(honest_uploads(folder), hostile, seed=2)):
        (inbox / f"x{number:04d}.safetensors").write_bytes(content)
    files = sorted(inbox.iterdir())
    largest = max(path.stat().st_size for path in files if path.name.startswith("0"))
    with peak_growth() as reading:
        intake = take_in(charter, files)
    assert len(intake.uploads) == members
    del intake
    with peak_growth() as fusing:
        content = fuse_federation(folder / "federation", uploads=inbox).content
    names = list(content.names)
    assert names == [f"m{number:04d}" for number in range(members)]
    refused = [verdict for verdict in content.verdicts if verdict.status == "refused"]
    assert len(refused) == hostile
    assert all(verdict.reason and verdict.reason.isprintable() for verdict in refused)
    assert (folder / "federation" / "model.safetensors").exists()
    return {
        "uploads": members,
        "fused": len(names),
        "hostile": hostile,
        "refused": len(refused),
        "upload_bytes": largest,
        "intake_peak_bytes": reading.bytes,
        "fusion_peak_bytes": fusing.bytes,
    }


def test_a_folder_of_uploads_is_taken_whole(tmp_path):
    crowd(tmp_path, 40, 20)


@pytest.mark.soak
def test_a_thousand_uploads_are_taken_without_loss(tmp_path):
    figures = crowd(tmp_path, 1000, 200)
    small = 4 * figures["upload_bytes"] * figures["uploads"]
    assert figures["intake_peak_bytes"] < (64 << 20)
    assert figures["fusion_peak_bytes"] < (256 << 20) + small, "more than the model file itself explains"
    record("load", figures)


@pytest.mark.soak
def test_two_hundred_flower_replies_are_taken_without_loss(tmp_path):
    """Flower's simulation, two nodes at a time; every one of the 200 replies becomes an upload and is fused."""
    import json

    words = [
        "data.train_size=1200",
        "data.test_size=60",
        "clients=200",
        "alpha=100",
        "encoder=conv4",
        "encoder.width=4",
    ]
    words += ["epochs=1", "train.snapshots=0", "fusions=feature_mean", "partition.kind=iid"]
    outcome = oneflare("run", *words, "engine=flower", "--out", "run", "--json", cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    content = json.loads(outcome.stdout)
    assert content["fused_clients"] == list(range(200))
    record(
        "flower",
        {
            "replies": 200,
            "fused": len(content["fused_clients"]),
            "peak_bytes": content["cost"]["peak_memory_bytes"],
        },
    )
