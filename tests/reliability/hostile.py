"""Files that must never be fused: seeded mutations of honest uploads that know the format.

Every mutation makes a file that is wrong by construction; where the damage is inside, all digests are made right again,
as somebody who means harm would.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from oneflare.client.statistics import exact_statistics, measure_on_lattice, privatise
from oneflare.core.files import digest_of, tensor_digest
from oneflare.core.noise import SeededWords
from oneflare.core.privacy import Privacy
from oneflare.core.seeds import numpy_generator
from oneflare.data import ClientData, ImageSpec
from oneflare.nn import initial_network
from oneflare.upload import ENCODER, MANIFEST, Agreement, Contents, Contract, SentForm, read_upload, write_upload
from oneflare.upload.statistics import Plan, pack

SPEC = {"name": "conv4", "width": 2, "dim": 8}
IMAGE = ImageSpec.default(1, 8)
TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.int16: "I16", torch.int8: "I8"}
TYPES |= {torch.float64: "F64", torch.float16: "F16", torch.uint8: "U8", torch.bool: "BOOL"}

Generator = np.random.Generator


@dataclass(frozen=True)
class Honest:
    """An honest upload in parts."""

    contract: Contract
    raw: bytes
    manifest: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @property
    def floats(self) -> list[str]:
        return [name for name, tensor in self.tensors.items() if tensor.is_floating_point()]

    @property
    def weights(self) -> list[str]:
        return [name for name in self.floats if name.startswith(ENCODER) and "running_" not in name]


def honest_uploads(folder: Path) -> list[Honest]:
    """One of every kind that the library writes."""
    from oneflare.nn import feature_map_spec

    network = initial_network(SPEC, IMAGE, 4, seed=0)
    spec = feature_map_spec({"name": "random_conv", "filters": 4}, False)
    plain = Plan.of(spec, 1, 8)
    short = Plan.of(spec, 1, 8, "int16")
    private = Plan.of(spec, 1, 8, "float32", Privacy(1.0, 1e-5, 1.0))
    blocks = feature_map_spec({"name": "paired", "features": 40, "blocks": 3}, False)
    in_blocks = Plan.of(blocks, 1, 8, "int16")
    withheld = SentForm(counts="withheld")
    kinds: list[tuple[dict[str, Any], dict[str, Any], SentForm]] = [
        ({}, {}, SentForm()),
        ({}, {}, SentForm(dtype="bfloat16")),
        ({}, {}, SentForm(dtype="int8")),
        ({}, {}, SentForm(counts="noised")),
        ({}, {"trust": 0.5}, withheld),
        ({"statistics": plain}, {"trust": 1.5}, SentForm()),
        ({"statistics": short, "deep": False}, {"epoch": 0}, SentForm()),
        ({"statistics": private, "deep": False}, {"epoch": 0}, withheld),
        ({"statistics": in_blocks, "deep": False}, {"epoch": 0}, SentForm()),
    ]
    return [_honest(folder, network, *kind) for kind in kinds]


def _honest(folder: Path, network: Any, terms: dict[str, Any], options: dict[str, Any], form: SentForm) -> Honest:
    from oneflare.nn import build_feature_map

    contract = Contract.of(
        network,
        Agreement(
            federation="f" * 64,
            method="flare",
            encoder=SPEC,
            anchors={"name": "etf", "scale": 1.0, "seed": 0},
            image=IMAGE,
            classes=("a", "b", "c", "d"),
            **terms,
        ),
    )
    counts = torch.tensor([3, 0, 5, 1])
    plan = contract.statistics
    if plan is not None:
        generator = torch.Generator().manual_seed(0)
        labels = torch.repeat_interleave(torch.arange(4), counts)
        images = torch.randint(0, 256, (9, 1, 8, 8), generator=generator, dtype=torch.uint8)
        features = build_feature_map(plan.feature_map, 1, 8, plan.bound)
        if plan.privacy is None:
            packed = exact_statistics(plan, features, ClientData(images, labels, counts), 4)
        else:
            exact = measure_on_lattice(features, images, labels, 4, plan.privacy)
            packed = pack(privatise(exact, plan.privacy, SeededWords(0)), plan.dtype)
        options = options | {"statistics": packed}
    path = folder / "honest.safetensors"
    contents = Contents(**{"client": 2, "counts": counts, "epoch": 7} | options)
    write_upload(path, network if contract.deep else None, contract, contents, form)
    read_upload(path, contract)
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    manifest = json.loads(json.loads(raw[8 : 8 + length])["__metadata__"][MANIFEST])
    return Honest(contract, raw, manifest, {name: t.clone() for name, t in load_file(path).items()})


Mutation = Callable[[Honest, Generator], bytes | None]
MUTATIONS: dict[str, Mutation] = {}


def mutation(function: Mutation) -> Mutation:
    MUTATIONS[function.__name__] = function
    return function


def mutants(honest: list[Honest], number: int, seed: int) -> Iterator[tuple[str, Honest, bytes]]:
    """`number` files, each different from the upload it was made of; the kinds take turns."""
    names = list(MUTATIONS)
    made = tried = 0
    while made < number:
        generator = numpy_generator(seed, "hostile", tried)
        name = names[tried % len(names)]
        upload = honest[int(generator.integers(len(honest)))]
        tried += 1
        content = MUTATIONS[name](upload, generator)
        if content is not None and content != upload.raw:
            made += 1
            yield name, upload, content


# ---- bytes


@mutation
def flipped_bits(upload: Honest, generator: Generator) -> bytes:
    content = bytearray(upload.raw)
    for _ in range(int(generator.choice([1, 1, 1, 2, 8, 64]))):
        content[int(generator.integers(len(content)))] ^= 1 << int(generator.integers(8))
    return bytes(content)


@mutation
def flipped_header_bits(upload: Honest, generator: Generator) -> bytes:
    content = bytearray(upload.raw)
    length = 8 + int.from_bytes(content[:8], "little")
    content[int(generator.integers(length))] ^= 1 << int(generator.integers(8))
    return bytes(content)


@mutation
def cut_off(upload: Honest, generator: Generator) -> bytes:
    return upload.raw[: int(generator.integers(len(upload.raw)))]


@mutation
def lengthened(upload: Honest, generator: Generator) -> bytes:
    return upload.raw + generator.bytes(int(generator.choice([1, 8, 4096])))


@mutation
def overwritten_block(upload: Honest, generator: Generator) -> bytes:
    content = bytearray(upload.raw)
    start = int(generator.integers(len(content)))
    size = int(generator.integers(1, 200))
    content[start : start + size] = (b"\0" * size if generator.random() < 0.5 else generator.bytes(size))[
        : len(content) - start
    ]
    return bytes(content)


@mutation
def moved_block(upload: Honest, generator: Generator) -> bytes:
    content = upload.raw
    a, b = sorted(int(v) for v in generator.integers(len(content), size=2))
    return content[:a] + content[b:] + content[a:b]


@mutation
def noise(upload: Honest, generator: Generator) -> bytes:
    return generator.bytes(int(generator.choice([0, 1, 7, 8, 9, 100, 5000])))


@mutation
def header_length(upload: Honest, generator: Generator) -> bytes:
    true = int.from_bytes(upload.raw[:8], "little")
    lengths = [0, 1, true - 1, true + 1, len(upload.raw), len(upload.raw) - 8, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63]
    lengths += [(1 << 64) - 1, (1 << 64) - 8, int(generator.integers(1 << 62))]
    return struct.pack("<Q", lengths[int(generator.integers(len(lengths)))]) + upload.raw[8:]


class Bomb:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('a pickle was opened')",))


@mutation
def another_format(upload: Honest, generator: Generator) -> bytes:
    kind = generator.integers(6)
    buffer = io.BytesIO()
    if kind == 0:
        return pickle.dumps(Bomb())
    if kind == 1:
        torch.save({"prototypes": torch.zeros(3)}, buffer)
    elif kind == 2:
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:  # a megabyte in a kilobyte
            archive.writestr("../../upload.safetensors", b"\0" * (1 << 20))
    elif kind == 3:
        buffer.write(gzip.compress(upload.raw + b"\0" * (1 << 20)))
    elif kind == 4:
        np.save(buffer, np.array([Bomb()], dtype=object), allow_pickle=True)
    else:
        text = pickle.dumps(Bomb())
        return struct.pack("<Q", len(text)) + text
    return buffer.getvalue()


# ---- header


def file_of(header: str | bytes, body: bytes) -> bytes:
    text = header.encode("utf-8", "surrogatepass") if isinstance(header, str) else header
    return struct.pack("<Q", len(text)) + text + body


def split_file(upload: Honest) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", upload.raw[:8])
    return json.loads(upload.raw[8 : 8 + length]), upload.raw[8 + length :]


def deep(generator: Generator) -> str:
    depth = int(generator.choice([50, 500, 5_000, 15_000]))
    return "[" * depth + "]" * depth if generator.random() < 0.5 else '{"a":' * depth + "1" + "}" * depth


@mutation
def strange_json(upload: Honest, generator: Generator) -> bytes:
    header, body = split_file(upload)
    text = json.dumps(header)
    inside = text[:-1]
    forms: list[str | bytes] = [
        deep(generator),
        inside + ',"x":' + deep(generator) + "}",
        inside + ',"x":' + "[" + "[]," * 300_000 + "[]]}",
        inside + ',"x":' + "9" * 5_000 + "}",
        inside + ',"x":NaN}',
        inside + ',"x":Infinity}',
        inside + ',"x":1e999}',
        inside + ',"__metadata__":{}}',
        '{"__metadata__":{},' + text[1:],
        text.encode("utf-16"),
        text.encode("utf-32"),
        b"\xef\xbb\xbf" + text.encode(),
        text + "{}",
        "[" + text + "]",
        "null",
        '""',
        text.replace('"dtype"', '"dtype":"I8","dtype"', 1),
        text.replace('"shape"', '"shape":[9999999],"shape"', 1),
        text.replace('"data_offsets"', '"data_offsets":[0,0],"data_offsets"', 1),
    ]
    return file_of(forms[int(generator.integers(len(forms)))], body)


@mutation
def wrong_offsets(upload: Honest, generator: Generator) -> bytes:
    header, body = split_file(upload)
    names = [name for name in header if name != "__metadata__"]
    first, second = (names[int(i)] for i in generator.choice(len(names), 2, replace=False))
    start, end = header[first]["data_offsets"]
    other = header[second]["data_offsets"]
    forms = [
        other,
        [end, start],
        [start, end + 1],
        [start - 1, end],
        [start + 4, end + 4],
        [0, len(body)],
        [start, start],
        [len(body), 2 * len(body)],
        [1 << 62, (1 << 62) + end - start],
        [-end, -start],
        [start, 1 << 64],
        [float(start), float(end) + 0.5],
        [start],
        [start, end, end],
        "0,4",
        None,
    ]
    header[first]["data_offsets"] = forms[int(generator.integers(len(forms)))]
    if generator.random() < 0.2:
        header[second]["data_offsets"] = [start, end]
    return file_of(json.dumps(header), body)


@mutation
def wrong_entry(upload: Honest, generator: Generator) -> bytes:
    """Shapes and types that the bytes do not have, told by the header alone."""
    header, body = split_file(upload)
    names = [name for name in header if name != "__metadata__"]
    name = names[int(generator.integers(len(names)))]
    entry = header[name]
    shape = entry["shape"]
    changes: list[Any] = [
        entry | {"shape": [*shape, 1]},
        entry | {"shape": [1, *shape]},
        entry | {"shape": [1 << 31, 1 << 31, 1 << 31]},
        entry | {"shape": [-n for n in shape] or [-1]},
        entry | {"shape": [float(n) for n in shape] or [1.0]},
        entry | {"shape": [True]},
        entry | {"shape": []} if shape else entry | {"shape": [2]},
        entry | {"shape": list(reversed(shape)) if shape != shape[::-1] else [0, *shape]},
        entry | {"dtype": str(generator.choice(["F64", "F16", "U8", "BOOL", "C64", "F8_E4M3", "object", "", "f32"]))},
        entry | {"dtype": 32},
        entry | {"dtype": ["F32"]},
        entry | {"extra": 1},
        {key: value for key, value in entry.items() if key != "dtype"},
        [entry],
        None,
        "F32",
    ]
    header[name] = changes[int(generator.integers(len(changes)))]
    return file_of(json.dumps(header), body)


@mutation
def strange_metadata(upload: Honest, generator: Generator) -> bytes:
    header, body = split_file(upload)
    text = header["__metadata__"][MANIFEST]
    forms: list[Any] = [
        {MANIFEST: upload.manifest},
        {MANIFEST: text, "format": "pt"},
        {MANIFEST: [text]},
        {MANIFEST: ""},
        {MANIFEST: deep(generator)},
        {MANIFEST: text[:-1] + ',"samples":9}'},
        {MANIFEST: '{"schema":1,' + text[1:]},
        {MANIFEST: text + " x"},
        {MANIFEST: text.replace('"client": 2', '"client": NaN')},
        {MANIFEST: "9" * 5000},
        {MANIFEST.upper(): text},
        [],
        text,
        None,
        {},
    ]
    header["__metadata__"] = forms[int(generator.integers(len(forms)))]
    return file_of(json.dumps(header), body)


# ---- content, with every digest made right again


def forged(
    upload: Honest,
    manifest: dict[str, Any] | None = None,
    tensors: dict[str, torch.Tensor | None] | None = None,
    drop: tuple[str, ...] = (),
) -> bytes:
    content = {**upload.tensors, **(tensors or {})}
    kept = {name: t.contiguous() for name, t in content.items() if t is not None}
    fields = {key: value for key, value in upload.manifest.items() if key not in ("digest", *drop)}
    fields["tensors"] = {name: tensor_digest(t) for name, t in sorted(kept.items())}
    fields |= manifest or {}
    fields = {key: value for key, value in fields.items() if key not in drop}
    fields["digest"] = digest_of(fields)
    header: dict[str, Any] = {"__metadata__": {MANIFEST: json.dumps(fields, sort_keys=True)}}
    body = b""
    for name, t in kept.items():
        data = t.reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": TYPES[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    return file_of(json.dumps(header), body)


STRANGE: list[Any] = [None, True, False, -1, 1.5, "", "9", [], {}, [9], 1 << 60, 1e300, "x" * 5000, "\u202e\n\x1b[2J"]


@mutation
def altered_field(upload: Honest, generator: Generator) -> bytes:
    """A field of another type or value; 0 and small numbers are left out where they could be true."""
    keys = [key for key in upload.manifest if key not in ("digest", "signature", "trust", "tensors")]
    key = keys[int(generator.integers(len(keys)))]
    value = STRANGE[int(generator.integers(len(STRANGE)))]
    if key == "epoch" and value is False:
        value = None
    if upload.manifest[key] is None and value is None:
        value = {}
    return forged(upload, {key: value})


@mutation
def altered_inside(upload: Honest, generator: Generator) -> bytes:
    manifest = upload.manifest
    forms: list[dict[str, Any]] = [
        {"classes": manifest["classes"][::-1]},
        {"classes": [*manifest["classes"], "e"]},
        {"classes": tuple(name.upper() for name in manifest["classes"])},
        {"image": manifest["image"] | {"size": 8.0}},
        {"image": manifest["image"] | {"mean": [0.4]}},
        {"encoder": manifest["encoder"] | {"width": 3}},
        {"encoder": manifest["encoder"] | {"path": "../../etc/passwd"}},
        {"anchors": manifest["anchors"] | {"seed": 1}},
        {"dim": float(manifest["dim"])},
        {"schema": 1.0},
        {"schema": 2},
        {"federation": "e" * 64},
        {"method": "fafi"},
        {"samples": manifest["samples"] + 1} if "counts" in upload.tensors else {"samples": 10**12},
        {"samples": float(manifest["samples"])},
        {"counts": "withheld" if "counts" in upload.tensors else "exact"},
        {"client": -1},
        {"client": "../2"},
        {"epoch": -1},
        {"trust": -0.1},
        {"trust": 1e4},
        {"trust": "1"},
        {"trust": True},
        {"statistics": {"dim": 3}},
        {"path": "/etc/passwd"},
        {"../evil": 1},
        {"weights": [0] * 2000},
    ]
    return forged(upload, forms[int(generator.integers(len(forms)))])


@mutation
def missing_field(upload: Honest, generator: Generator) -> bytes:
    absent_is_fine = {"digest", "signature", "trust"} | (
        {"statistics"} if upload.contract.statistics is None else set()
    )
    keys = [key for key in upload.manifest if key not in absent_is_fine]
    return forged(upload, drop=(keys[int(generator.integers(len(keys)))],))


@mutation
def wrong_digests(upload: Honest, generator: Generator) -> bytes:
    names = list(upload.tensors)
    name = names[int(generator.integers(len(names)))]
    true = {key: tensor_digest(t) for key, t in upload.tensors.items()}
    forms: list[Any] = [
        true | {name: "0" * 64},
        true | {name: None},
        true | {name: true[name].upper()},
        true | {name: [true[name]]},
        {key: value for key, value in true.items() if key != name},
        true | {"../" + name: true[name]},
        list(true),
        {},
        None,
    ]
    return forged(upload, {"tensors": forms[int(generator.integers(len(forms)))]})


NAMES = [
    "../../etc/passwd", "/etc/shadow", "..\\..\\boot.ini", "encoder.", "", "encoder.layers.0.weight\0", "a/../b",
    "encoder.__class__", "\u202eprototypes", "counts ", "Prototypes", "prototypes\n", "x" * 3000, "encoder.\x1b[2J",
    "statistics.other", "encoder.layers.0.weight#scale#scale",
]  # fmt: skip


@mutation
def strange_names(upload: Honest, generator: Generator) -> bytes:
    """A tensor renamed, copied under another name, or added."""
    name = NAMES[int(generator.integers(len(NAMES)))]
    names = [key for key in upload.tensors if key != "counts"]
    old = names[int(generator.integers(len(names)))]
    kind = generator.integers(3)
    if kind == 0:
        return forged(upload, tensors={old: None, name: upload.tensors[old]})
    return forged(upload, tensors={name: upload.tensors[old] if kind == 1 else torch.zeros(1)})


@mutation
def swapped_names(upload: Honest, generator: Generator) -> bytes | None:
    """Two tensors of different shape or type exchange their names."""
    names = list(upload.tensors)
    first, second = (names[int(i)] for i in generator.choice(len(names), 2, replace=False))
    a, b = upload.tensors[first], upload.tensors[second]
    if a.shape == b.shape and a.is_floating_point() == b.is_floating_point():
        return None
    return forged(upload, tensors={first: b, second: a})


@mutation
def missing_tensor(upload: Honest, generator: Generator) -> bytes:
    names = list(upload.tensors)
    return forged(upload, tensors={names[int(generator.integers(len(names)))]: None})


@mutation
def wrong_shape(upload: Honest, generator: Generator) -> bytes:
    names = list(upload.tensors)
    name = names[int(generator.integers(len(names)))]
    t = upload.tensors[name]
    forms = [t[None], t.reshape(-1)[:-1], torch.cat([t.reshape(-1), t.reshape(-1)]), t.reshape(-1)[:0]]
    other = forms[int(generator.integers(len(forms)))]
    return forged(upload, tensors={name: other})


@mutation
def wrong_type(upload: Honest, generator: Generator) -> bytes:
    names = list(upload.tensors)
    name = names[int(generator.integers(len(names)))]
    t = upload.tensors[name]
    types = [torch.float64, torch.float16, torch.uint8, torch.bool]
    types += [torch.int64, torch.int16] if t.is_floating_point() else [torch.float32, torch.bfloat16]
    return forged(upload, tensors={name: t.to(types[int(generator.integers(len(types)))])})


@mutation
def not_finite(upload: Honest, generator: Generator) -> bytes:
    name = upload.floats[int(generator.integers(len(upload.floats)))]
    t = upload.tensors[name].clone()
    value = [float("nan"), float("inf"), float("-inf")][int(generator.integers(3))]
    t.view(-1)[int(generator.integers(t.numel()))] = value
    return forged(upload, tensors={name: t})


@mutation
def enormous(upload: Honest, generator: Generator) -> bytes:
    name = upload.floats[int(generator.integers(len(upload.floats)))]
    t = upload.tensors[name].clone()
    value = float(generator.choice([1e38, -1e38, 3.3e38, 1e30, 1e20]))
    if generator.random() < 0.5:
        t.view(-1)[int(generator.integers(t.numel()))] = value
    else:
        t.fill_(value)
    return forged(upload, tensors={name: t})


@mutation
def denormal(upload: Honest, generator: Generator) -> bytes | None:
    if not upload.weights:
        return None
    name = upload.weights[int(generator.integers(len(upload.weights)))]
    t = torch.full_like(upload.tensors[name], float(generator.choice([1e-39, 1e-40, -1e-38])))
    return forged(upload, tensors={name: t})


@mutation
def negative_where_it_cannot_be(upload: Honest, generator: Generator) -> bytes | None:
    names = [
        name
        for name in upload.tensors
        if name.endswith(("running_var", "counts", "#scale", "num_batches_tracked")) or name == "statistics.scatter"
    ]
    name = names[int(generator.integers(len(names)))]
    t = upload.tensors[name].clone()
    if name == "statistics.scatter":
        if not t.is_floating_point() or upload.contract.statistics.privacy is not None:
            return None
        t[0] = -1.0
    else:
        t.view(-1)[int(generator.integers(t.numel()))] = -3
    return forged(upload, tensors={name: t})


@mutation
def impossible_counts(upload: Honest, generator: Generator) -> bytes | None:
    names = [name for name in upload.tensors if name.endswith("counts")]
    if not names or (upload.contract.statistics is not None and upload.contract.statistics.privacy is not None):
        return None
    name = names[int(generator.integers(len(names)))]
    t = upload.tensors[name].clone()
    t[int(generator.integers(len(t)))] += int(generator.choice([1, 1000, 1 << 40, (1 << 62)]))
    return forged(upload, tensors={name: t})


@mutation
def replayed(upload: Honest, generator: Generator) -> bytes:
    """An honest member's upload to another federation."""
    return forged(replace(upload), {"federation": generator.bytes(32).hex()})
