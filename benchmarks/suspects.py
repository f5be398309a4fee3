"""Who is suspected in real federations: `python -m benchmarks.suspects RUNS [--flip PATTERN ...]`.

Takes every finished run of trained networks in RUNS or RUNS/cells (those of `oneflare study ... --runs RUNS`) as it
is, and then with each of its members in turn as the attacker, and counts who is suspected. `--flip` also trains the
members of the runs whose names begin with PATTERN on flipped labels, below RUNS/flipped; what is there is not trained
again. Every run is kept in results/trust/real.json as soon as it is looked at; a rerun looks at what is missing. Where
uploads hold evidence beside the network, attackers lie about that too; uploads with statistics are left alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from oneflare._version import __version__
from oneflare.client.observer import Observer
from oneflare.core.files import read_json, write_json
from oneflare.data import load
from oneflare.errors import UploadError
from oneflare.fusion import UploadSet
from oneflare.fusion.trust.probes import probe_features
from oneflare.fusion.trust.suspects import LEAST_MEMBERS, find_suspects
from oneflare.nn.encoders import Features
from oneflare.nn.hardware import one_thread
from oneflare.simulation.stages import open_run, read_experiment, run_experiment
from oneflare.study.attacks import ATTACKS, LABEL_FLIP, NOBODY, counts_of, network_of, with_flipped_labels
from oneflare.study.lies import LIES, rewritten
from oneflare.upload import EVIDENCE, Contents, Upload, read_tensors, read_upload, write_upload

RESULTS = Path("results/trust/real.json")


def poisoned(uploads: UploadSet, folder: Path) -> Iterator[tuple[str, Upload | None]]:
    """Every attack by every member, written and read like any upload; None where it is refused."""
    for upload in uploads:
        for name, attack in ATTACKS.items():
            network, counts = attack(network_of(uploads, upload), counts_of(upload), upload.client)
            path = folder / f"{name}-{upload.client:03d}.safetensors"
            rest = read_tensors(upload.path, upload.manifest)
            evidence = {n.removeprefix(EVIDENCE): t for n, t in rest.items() if n.startswith(EVIDENCE)}
            contents = Contents(client=upload.client, counts=counts, epoch=1, evidence=evidence)
            write_upload(path, network, uploads.contract, contents)
            yield name, received(path, uploads)
            path.unlink()
        for name, (needed, lie) in LIES.items():
            if any(entry.startswith(needed) for entry in upload.entries):
                path = rewritten(upload, folder / f"{name}-{upload.client:03d}.safetensors", lie)
                yield name, received(path, uploads)
                path.unlink()


def received(path: Path, uploads: UploadSet) -> Upload | None:
    """What the server makes of a file; None if it refuses to read it."""
    try:
        return read_upload(path, uploads.contract)
    except UploadError:
        return None


def flipped(cell: Path, folder: Path) -> UploadSet:
    """The same members, trained on flipped labels."""
    experiment = read_experiment(cell)
    federation, uploads = open_run(cell, Observer())
    data = with_flipped_labels(load(experiment.data))
    run_experiment(experiment, folder, dataset=dataclasses.replace(data, owners=federation.partition.indices))
    members = (folder / "clients" / f"{upload.client:03d}" / upload.path.name for upload in uploads)
    return dataclasses.replace(uploads, uploads=tuple(read_upload(path, uploads.contract) for path in members))


REMEMBERED: dict[str, Features] = {}


def features_of(alone: UploadSet) -> Features:
    """Of the probes, `(1, probes, d)`; each upload is asked once."""
    (upload,) = alone.uploads
    if upload.digest not in REMEMBERED:
        REMEMBERED[upload.digest] = probe_features(alone)
    return REMEMBERED[upload.digest]


def look(uploads: UploadSet, attack: str, sent: Upload | None) -> dict[str, Any]:
    """Who is suspected when one member sends this."""
    attacker = None if sent is None else sent.client
    received = tuple(sent if sent is not None and upload.client == attacker else upload for upload in uploads)
    features = Features.together([features_of(dataclasses.replace(uploads, uploads=(upload,))) for upload in received])
    sent_in = dataclasses.replace(uploads, uploads=received)
    found = {suspect.client: suspect.reason for suspect in find_suspects(sent_in, features=features)}
    wrongly = {client: reason for client, reason in found.items() if client != attacker}
    return {"attack": attack, "attacker": attacker, "named": attacker in found, "wrongly": wrongly}


def look_at_run(cell: Path, scratch: Path, flips: Path | None) -> dict[str, Any] | None:
    _, uploads = open_run(cell, Observer())
    contract = uploads.contract
    if not contract.deep or contract.statistics is not None or len(uploads) < LEAST_MEMBERS:
        return None
    experiment = read_experiment(cell)
    with one_thread():
        seen = [look(uploads, NOBODY, None)]
        seen += [look(uploads, name, sent) for name, sent in poisoned(uploads, scratch) if sent is not None]
        if flips is not None:
            seen += [look(uploads, LABEL_FLIP, upload) for upload in flipped(cell, flips)]
    REMEMBERED.clear()
    return {
        "run": cell.name,
        "data": experiment.data.name,
        "method": experiment.method,
        "alpha": experiment.partition.alpha,
        "seed": experiment.seed,
        "members": len(uploads),
        "seen": seen,
    }


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By alpha and attack: attackers, those named, and honest members suspected, of all honest ones."""
    total: dict[tuple[float, str], Counter[str]] = {}
    for run in runs:
        for seen in run["seen"]:
            row = total.setdefault((run["alpha"], seen["attack"]), Counter())
            attackers = int(seen["attacker"] is not None)
            row.update(federations=1, attackers=attackers, named=int(seen["named"]))
            row.update(honest=run["members"] - attackers, wrongly=len(seen["wrongly"]))
    return [{"alpha": alpha, "attack": attack, **row} for (alpha, attack), row in sorted(total.items())]


def keep(runs: Sequence[dict[str, Any]]) -> None:
    write_json(RESULTS, {"oneflare": __version__, "summary": summary(runs), "runs": runs})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--flip", action="append", default=[], metavar="PATTERN")
    arguments = parser.parse_args()
    runs = {run["run"]: run for run in read_json(RESULTS)["runs"]} if RESULTS.exists() else {}
    cells = arguments.runs / "cells"
    for cell in sorted((cells if cells.exists() else arguments.runs).iterdir()):
        if cell.name in runs or not (cell / "result.json").exists():
            continue
        wanted = any(cell.name.startswith(pattern) for pattern in arguments.flip)
        flips = arguments.runs / "flipped" / cell.name if wanted else None
        with tempfile.TemporaryDirectory() as scratch:
            run = look_at_run(cell, Path(scratch), flips)
        if run is None:
            continue
        runs[cell.name] = run
        keep(list(runs.values()))
        odd = [seen for seen in run["seen"] if seen["wrongly"] or (seen["attacker"] is not None) > seen["named"]]
        print(cell.name, odd or "", flush=True)
    rows = summary(list(runs.values()))
    print("| alpha | attack | federations | attackers named | honest members suspected |\n|---|---|---|---|---|")
    for row in rows:
        named = f"{row['named']} of {row['attackers']}" if row["attackers"] else ""
        print(
            f"| {row['alpha']:g} | {row['attack']} | {row['federations']} | {named} "
            f"| {row['wrongly']} of {row['honest']} |"
        )


if __name__ == "__main__":
    main()
