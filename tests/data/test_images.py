"""Encoded images to pixels: every kind of file, the stated rules, and the same pixels at every door."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from PIL import Image
from starlette.requests import Request

from hospitals import TINY, make, tiny_charter, typed
from oneflare.core.config import DataConfig, Experiment, Pixels
from oneflare.core.files import digest_of
from oneflare.core.layers import validate
from oneflare.data import ImageSpec, from_arrays, given_data, load
from oneflare.data.images import ImageFiles, Tally, decode_all
from oneflare.data.local import read_local
from oneflare.data.reading import read_all
from oneflare.errors import DataError, UploadError
from oneflare.federation.intake import take_in
from oneflare.federation.member import make_upload, member_data, upload_notes
from oneflare.fusion import GlobalModel
from oneflare.models.base import Task
from oneflare.models.predicting import read_images
from oneflare.models.serving.app import Predictor
from oneflare.models.serving.limits import Limits
from oneflare.upload import read_upload, seal_upload

GREY, COLOUR = ImageSpec.default(1, 8), ImageSpec.default(3, 8)
RAMP = np.arange(64, dtype=np.float64).reshape(8, 8)
XRAY = (600 + RAMP / 63 * 3100).astype(np.uint16)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def grey(**rule) -> ImageSpec:
    return ImageSpec.default(1, 8, Pixels(**rule))


def reason(content: bytes, spec: ImageSpec = GREY) -> str:
    with pytest.raises(DataError) as caught:
        read_all([content], ["scan.png"], spec)
    text = str(caught.value)
    assert text.startswith("cannot read image scan.png: ")
    assert "\n" not in text
    return text


def notes(content: bytes, spec: ImageSpec) -> str:
    tally = Tally(spec)
    _, damaged = decode_all(ImageFiles([content], ["scan"]), spec, tally)
    assert not damaged
    return "; ".join(tally.notes())


def png_of(width: int, height: int, bits: int, colour_type: int, body: bytes) -> bytes:
    """A PNG as its header says, whatever the body is."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(body)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, content) for kind, content in parts)


def deep_png(rows: np.ndarray) -> bytes:
    """Three channels of 16 bits, which pillow cannot write."""
    body = b"".join(b"\0" + row.astype(">u2").tobytes() for row in rows)
    return png_of(rows.shape[1], rows.shape[0], 16, 2, body)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_follow_the_stated_rule(kind):
    content = encoded(Image.fromarray(XRAY), kind)
    by_window = read_all([content], ["x"], grey(low=600, high=3700))[0, 0]
    assert np.array_equal(by_window, np.round((XRAY - 600.0) / 3100 * 255).astype(np.uint8))
    by_depth = read_all([content], ["x"], grey(bits=12))[0, 0]
    assert np.array_equal(by_depth, np.round(XRAY / np.float32(4095) * 255).astype(np.uint8))
    in_colour = read_all([content], ["x"], ImageSpec.default(3, 8, Pixels(bits=12)))[0]
    assert torch.equal(in_colour, by_depth.expand(3, 8, 8))
    assert "were scaled from more than 8 bits to brightness by pixels.bits=12" in notes(content, grey(bits=12))
    assert "values outside the window 1000 to 2000, which were clipped" in notes(content, grey(low=1000, high=2000))
    assert "16-bit values (600 to 3700)" in reason(content)
    assert "do not fit in pixels.bits=11, which holds 0 to 2047" in reason(content, grey(bits=11))


def test_floats_follow_a_window():
    content = encoded(Image.fromarray((RAMP / 63).astype(np.float32)), "TIFF")
    expected = np.round(RAMP / 63 * 255).astype(np.uint8)
    assert np.array_equal(read_all([content], ["x"], grey(low=0, high=1))[0, 0], expected)
    assert "floating-point values (0 to 1) become brightness" in reason(content)
    assert "pixels.bits does not cover floating-point values" in reason(content, grey(bits=16))
    holes = encoded(Image.fromarray(np.where(RAMP > 60, np.nan, RAMP).astype(np.float32)), "TIFF")
    assert "not finite" in reason(holes, grey(low=0, high=1))


def test_signed_values_and_white_stored_as_zero():
    hounsfield = encoded(Image.fromarray((RAMP * 10 - 300).astype(np.int32)), "TIFF")
    pixels = read_all([hounsfield], ["x"], grey(low=-300, high=330))[0, 0]
    assert np.array_equal(pixels, np.round(RAMP / 63 * 255).astype(np.uint8))
    inverted = encoded(Image.fromarray(XRAY), "TIFF", tiffinfo={262: 0})
    plain = read_all([encoded(Image.fromarray(XRAY), "TIFF")], ["x"], grey(low=600, high=3700)).int()
    other = read_all([inverted], ["x"], grey(low=600, high=3700)).int()
    assert int((plain + other - 255).abs().max()) <= 1
    assert "store white as the smallest value and were inverted" in notes(inverted, grey(low=600, high=3700))


def test_sixteen_bits_per_colour_are_never_cut_silently():
    content = deep_png(np.repeat(XRAY[:, :, None], 3, axis=2))
    assert "16 bits per colour" in reason(content, COLOUR)
    assert "16 bits per colour" in reason(content, ImageSpec.default(3, 8, Pixels(bits=12)))
    pixels = read_all([content], ["x"], ImageSpec.default(3, 8, Pixels(bits=16)))[0, 0]
    assert np.array_equal(pixels, (XRAY >> 8).astype(np.uint8))


def test_eight_bits_keep_their_own_scale_and_it_is_said():
    shallow, deep = encoded(Image.fromarray(RAMP.astype(np.uint8))), encoded(Image.fromarray(XRAY))
    tally = Tally(grey(bits=12))
    images, _ = decode_all(ImageFiles([shallow, deep], ["a", "b"]), grey(bits=12), tally)
    assert np.array_equal(images[0, 0], RAMP.astype(np.uint8))
    assert "1 of 2 images have 8 bits and keep their own 0 to 255" in "; ".join(tally.notes())


@pytest.mark.parametrize("tag", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_images_are_turned_upright(kind, tag):
    upright = Image.new("L", (16, 24), 0)
    upright.paste(255, (0, 0, 8, 12))
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # pillow's numbers of the opposite turns
    stored = upright.transpose(Image.Transpose(undo[tag])) if tag in undo else upright
    exif = Image.Exif()
    exif[0x0112] = tag
    content = encoded(stored, kind, exif=exif)
    seen = read_all([content], ["x"], GREY)[0, 0].int()
    wanted = torch.from_numpy(np.asarray(upright.resize((8, 8), Image.Resampling.BILINEAR)).astype(np.int32))
    assert int((seen - wanted).abs().max()) <= 3
    assert ("turned upright by their EXIF tag" in notes(content, GREY)) == (tag != 1)


def hidden_red() -> Image.Image:
    image = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    image.paste((0, 0, 255, 255), (0, 0, 4, 8))
    return image


def test_transparent_places_show_the_agreed_colour():
    palette = Image.new("P", (8, 8), 0)
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.paste(1, (0, 0, 4, 8))
    for content in (
        encoded(hidden_red()),
        encoded(palette, transparency=0),
        encoded(hidden_red(), "WEBP", lossless=True),
    ):
        on_white = read_all([content], ["x"], COLOUR)[0]
        assert on_white[:, 0, 0].tolist() == [0, 0, 255]
        assert on_white[:, 0, 7].tolist() == [255, 255, 255]
        on_black = read_all([content], ["x"], ImageSpec.default(3, 8, Pixels(background="black")))[0]
        assert on_black[:, 0, 7].tolist() == [0, 0, 0]
        assert "transparent places, which were given the colour [255, 255, 255]" in notes(content, COLOUR)
    opaque = encoded(Image.fromarray(RAMP.astype(np.uint8)).convert("RGBA"))
    assert "transparent" not in notes(opaque, COLOUR)


def test_pages_are_refused_or_chosen():
    pages = [Image.new("L", (8, 8), value) for value in (10, 20, 30)]
    for kind in ("TIFF", "GIF"):
        content = encoded(pages[0], kind, save_all=True, append_images=pages[1:])
        assert "more than one page or frame" in reason(content)
        assert int(read_all([content], ["x"], grey(page=3))[0, 0, 0, 0]) == 30
        assert "page 3 was read" in notes(content, grey(page=3))
        assert "fewer than 4 pages" in reason(content, grey(page=4))
    assert int(read_all([encoded(pages[1])], ["x"], grey(page=1))[0, 0, 0, 0]) == 20


def test_damaged_foreign_and_enormous_files_are_refused_in_one_line():
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64), dtype=np.uint8))
    for kind in ("JPEG", "PNG", "TIFF", "WEBP", "GIF", "BMP"):
        content = encoded(noise, kind)
        for cut in (len(content) // 2, len(content) // 4, 40, 9):
            reason(content[:cut])
    assert "damaged or not an image" in reason(b"no image")
    assert "empty" in reason(b"")
    assert "damaged or not an image" in reason(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n")
    for side in (9_000, 12_000, 60_000):
        assert "limit of 80,000,000" in reason(png_of(side, side, 8, 0, b"\0" * 99))


def test_cmyk_and_sizes_are_counted():
    cmyk = encoded(Image.new("CMYK", (600, 450), (255, 0, 0, 0)), "JPEG")
    assert read_all([cmyk], ["x"], COLOUR)[0, :, 0, 0].tolist() == [0, 255, 255]
    said = notes(cmyk, COLOUR)
    assert "1 of 1 images were reduced from 600x450 to 8x8" in said
    assert "are in CMYK" in said
    tally = Tally(GREY)
    sizes = ((20, 20), (40, 30), (30, 40), (4, 4))
    decode_all(ImageFiles([encoded(Image.new("L", size, 3)) for size in sizes], ["x"] * 4), GREY, tally)
    assert "3 of 4 images were reduced from sizes between 20x20 and 40x30 to 8x8" in tally.notes()


def test_the_same_from_bytes_and_from_paths(tmp_path):
    content = encoded(hidden_red())
    (tmp_path / "a.png").write_bytes(content)
    assert torch.equal(read_all([content], ["x"], COLOUR), read_all([tmp_path / "a.png"], ["x"], COLOUR))
    assert "No such file" in str(decode_all(ImageFiles([tmp_path / "b.png"], ["b"]), COLOUR)[1][0])


# The terms.


def test_the_rule_is_part_of_the_terms_and_absent_from_old_digests():
    plain, ruled = validate({}), validate({"data": {"pixels": {"bits": 12}}})
    assert plain.training_digest() != ruled.training_digest()
    assert plain.partition_digest() != ruled.partition_digest()
    old = plain.model_dump(mode="json")
    del old["data"]["pixels"], old["data"]["skip_damaged"], old["data"]["patients"]
    assert Experiment.model_validate(old).training_digest() == plain.training_digest()
    data = plain.data.model_dump(exclude={"pixels", "public", "skip_damaged", "patients"})
    assert plain.partition_digest() == digest_of(
        [data, plain.partition.model_dump(exclude={"label_noise", "noisy_clients"}), plain.seed]
    )
    assert "pixels" not in GREY.to_dict()
    one = tiny_charter(id="0" * 32)
    other = tiny_charter(id="0" * 32, image={"size": 8, "channels": 1, "pixels": {"bits": 12}})
    assert one.fingerprint != other.fingerprint
    assert other.contract.image.pixels == Pixels(bits=12)
    assert ImageSpec.from_dict(other.contract.image.to_dict()) == other.contract.image
    assert "pixels" not in yaml.safe_load(one.to_yaml())["image"]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"low": 3}, "low and high belong together"),
        ({"low": 3, "high": 3}, "low must be smaller than high"),
        ({"bits": 12, "low": 3, "high": 4}, "not both"),
        ({"bits": 40}, "less than or equal to 16"),
        ({"background": "mauve"}, "background"),
        ({"page": 0}, "page"),
    ],
)
def test_impossible_rules_are_refused(rule, message):
    with pytest.raises(Exception, match=message) as caught:
        validate({"data": {"pixels": rule}})
    assert "\n" not in str(caught.value)


# Folders of images.


def write(folder: Path, content: bytes, name: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def scan(seed: int, **options) -> bytes:
    values = np.random.default_rng(seed).integers(600, 3700, (12, 12)).astype(np.uint16)
    return encoded(Image.fromarray(values), **options)


@pytest.fixture
def scans(tmp_path) -> Path:
    """16-bit images of two classes, in folders per patient."""
    for seed in range(24):
        write(tmp_path / "scans", scan(seed), f"{'ab'[seed % 2]}/patient{seed // 6}/{seed}.png")
    return tmp_path / "scans"


WINDOW = Pixels(low=600, high=3700)


def test_folders_of_patients_are_looked_into_and_changes_are_told(scans):
    dataset = load(DataConfig(name="folder", path=str(scans), image_size=8, pixels=WINDOW))
    assert (len(dataset.train.labels), len(dataset.test.labels)) == (18, 6)  # one of four patients
    assert dataset.image == ImageSpec.default(1, 8, WINDOW)
    assert dataset.train.images.float().std() > 20
    assert "24 of 24 images were reduced from 12x12 to 8x8" in dataset.notes
    with pytest.raises(DataError, match=r"24 of 24 images .*patient0/0\.png: no rule .* and 19 more"):
        load(DataConfig(name="folder", path=str(scans)))


def test_a_run_goes_on_without_damaged_images_if_it_is_told_to(scans, tmp_path, capsys):
    for name in ("a/cut.png", "b/patient0/cut.png"):
        write(scans, scan(1)[:60], name)
    terms = ["data=folder", f"data.path={scans}", "data.image_size=8", "data.pixels.low=600", "data.pixels.high=3700"]
    words = ["run", *terms, "method=analytic", "clients=2", "--quiet", "--out"]
    code, _, err = typed(capsys, *words, str(tmp_path / "refused"))
    assert code == 2
    assert err.count("\n") == 1
    assert "2 of 26 images cannot be used" in err
    assert "data.skip_damaged=true" in err
    code, _, err = typed(capsys, *words, str(tmp_path / "run"), "data.skip_damaged=true")
    assert code == 0, err
    content = json.loads((tmp_path / "run" / "result.json").read_text())
    assert content["data"]["train"] + content["data"]["test"] == 24
    assert "2 of 26 images could not be used and were left out" in content["data"]["notes"]


@pytest.mark.parametrize("word", ["data.pixels.bits=12", "data.skip_damaged=true"])
@pytest.mark.parametrize("data", ["digits", "cifar10"])
def test_settings_about_files_are_refused_where_none_are_read(word, data, capsys):
    code, _, err = typed(capsys, "run", f"data={data}", word)
    assert code == 2
    assert (
        err == f"error: {word.split('=')[0].removesuffix('.bits')} is for image files of your own (data=folder); "
        f"data={data} has none\n"
    )


def test_constant_images_and_classes_without_difference_are_refused_by_name(scans, tmp_path):
    config = DataConfig(name="folder", path=str(scans), image_size=8, pixels=WINDOW)
    write(scans, encoded(Image.new("I;16", (12, 12), 1000)), "a/flat.png")
    with pytest.raises(DataError, match=r"a/flat\.png: every pixel is the same \(33 of 255\)"):
        load(config)
    for index in range(3):
        write(tmp_path / "same", scan(0), f"a/{index}.png")
        write(tmp_path / "same", scan(index), f"b/{index}.png")
    with pytest.raises(DataError, match="all 3 images of class 'a' are equal"):
        load(config.model_copy(update={"path": str(tmp_path / "same")}))


def scans_charter(**fields):
    image = {"size": 8, "channels": 1, "pixels": {"low": 600, "high": 3700}}
    return tiny_charter(**({"classes": ["a", "b"], "image": image} | fields))


def test_dry_run_lists_every_damaged_file_and_they_can_be_skipped(scans, tmp_path, capsys):
    write(scans, scan(1)[:90], "a/patient1/cut.png")
    write(scans, b"text", "b/patient2/text.jpg")
    write(scans, encoded(Image.new("I;16", (9, 9), 700)), "b/flat.png")
    charter = scans_charter()
    charter.write(tmp_path / "federation.yaml")
    words = ["client", "train", str(tmp_path / "federation.yaml"), "--data", str(scans)]
    code, out, err = typed(capsys, *words, "--dry-run")
    assert code == 2
    for name in ("a/patient1/cut.png", "b/patient2/text.jpg", "b/flat.png"):
        assert name in out
    assert out.startswith("found: 24 PNG; 4 patients; 12x12 pixels; 3 damaged\n")
    assert len(out.splitlines()) == 4
    assert "3 of 27 images cannot be used" in err
    assert "--skip-damaged" in err
    code, _, err = typed(capsys, *words, "--out", str(tmp_path / "u.safetensors"))
    assert code == 2
    assert "--dry-run lists all" in err
    assert not (tmp_path / "u.safetensors").exists()
    code, out, err = typed(
        capsys, *words, "--skip-damaged", "--name", "north", "--out", str(tmp_path / "u.safetensors")
    )
    assert code == 0, err
    note = "3 of 27 images could not be used and were left out"
    assert f"note: {note}" in err
    assert "were reduced from 12x12 to 8x8" in err
    assert "left out" in out
    upload = read_upload(tmp_path / "u.safetensors", charter.contract)
    assert upload.notes == (note,)
    assert b"cut.png" not in upload.path.read_bytes()
    assert take_in(charter, [upload.path]).notes == (f"north says: {note}",)


def test_notes_reveal_no_number_that_is_withheld_and_are_bounded(scans, tmp_path):
    write(scans, b"text", "b/text.jpg")
    charter = scans_charter(settings=TINY | {"upload": {"counts": "withheld"}, "fusions": ["feature_mean"]})
    found = member_data(charter, scans, skip_damaged=True)
    assert len(found.damaged) == 1
    assert upload_notes(charter, found) == ("some images could not be used and were left out",)
    assert upload_notes(charter, found._replace(damaged=())) == ()
    plain = scans_charter()
    path = make_upload(plain, found.data, tmp_path / "a.safetensors", member="north").path
    for bad in (["x" * 201], ["x"] * 9, ["a\nb"]):
        seal_upload(path, tmp_path / "b.safetensors", member="north", created="now", notes=bad)
        with pytest.raises(UploadError, match="notes must be at most 8 printable lines"):
            read_upload(tmp_path / "b.safetensors", plain.contract)


# The same pixels at every door.


class Recorder(GlobalModel):
    """Keeps the pixels that it is asked about."""

    kind = "recorder"

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.seen: list[torch.Tensor] = []

    cost = state = from_state = None

    def logits(self, images, batch_size=256):
        self.seen.append(images)
        return torch.zeros(len(images), len(self.task.classes))


Recorder.__abstractmethods__ = frozenset()


def kinds() -> dict[str, bytes]:
    rng = np.random.default_rng(5)
    exif = Image.Exif()
    exif[0x0112] = 6
    photo = Image.fromarray(rng.integers(0, 255, (30, 20, 3), dtype=np.uint8))
    clear = photo.convert("RGBA")
    clear.putalpha(Image.fromarray(rng.integers(0, 255, (30, 20), dtype=np.uint8)))
    pages = [Image.fromarray(rng.integers(0, 255, (9, 9), dtype=np.uint8)) for _ in range(2)]
    return {
        "deep.png": scan(1),
        "deep.tif": scan(2, kind="TIFF"),
        "turned.jpg": encoded(photo, "JPEG", exif=exif),
        "clear.png": encoded(clear),
        "cmyk.jpg": encoded(photo.convert("CMYK"), "JPEG"),
        "palette.gif": encoded(photo.convert("P"), "GIF"),
        "pages.tif": encoded(pages[0], "TIFF", save_all=True, append_images=pages[1:]),
    }


def posted(contents: list[bytes]) -> Request:
    """What a browser sends to `oneflare serve`."""
    body = json.dumps({"images": [base64.b64encode(content).decode() for content in contents]}).encode()

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    return Request({"type": "http", "headers": [(b"content-type", b"application/json")]}, receive)


def test_every_door_gives_the_same_pixels(tmp_path):
    rule = Pixels(low=600, high=3700, background="black", page=1)
    files = kinds()
    for name, content in files.items():
        write(tmp_path / "images", content, f"a/p/{name}")
        write(tmp_path / "images", content, f"b/{name}")
    order = sorted(files)
    dataset = load(DataConfig(name="folder", path=str(tmp_path / "images"), image_size=8, pixels=rule))
    spec = dataset.image
    expected = read_all([files[name] for name in order], order, spec)
    charter = tiny_charter(
        classes=["a", "b"],
        image={"size": 8, "channels": spec.channels, "pixels": rule.model_dump(exclude_none=True)},
    )
    assert charter.contract.image == spec
    assert torch.equal(member_data(charter, tmp_path / "images").data.images, torch.cat([expected] * 2))
    both = torch.cat([dataset.train.images, dataset.test.images]).flatten(1)
    assert sorted(both.tolist()) == sorted(torch.cat([expected] * 2).flatten(1).tolist())
    model = Recorder(Task({"name": "conv4"}, spec, ("a", "b"), 4))
    images, errors = read_images(model, [tmp_path / "images" / "b" / name for name in order])
    assert not errors
    assert torch.equal(images, expected)
    evaluated = read_local(tmp_path / "images", ("a", "b"), model.task.image)
    assert torch.equal(evaluated.split.images, torch.cat([expected] * 2))
    asyncio.run(Predictor(model, Limits()).answer(posted([files[name] for name in order])))
    assert torch.equal(model.seen[0], expected)
    pq.write_table(
        pa.table({"image": [files[name] for name in order], "label": ["a"] * len(order)}), tmp_path / "t.parquet"
    )
    assert torch.equal(read_local(tmp_path / "t.parquet", ("a", "b"), spec).split.images, expected)


def test_a_model_carries_its_rule_and_old_ones_keep_their_answers(scans, tmp_path):
    charter = scans_charter()
    upload = read_upload(make(charter, scans, tmp_path / "u.safetensors", "north"), charter.contract)
    task = Task(upload.manifest["encoder"], charter.contract.image, charter.classes, charter.contract.dim)
    assert Task.from_dict(task.to_dict()) == task
    plain = replace(task, image=GREY)
    assert Task.from_dict(plain.to_dict()) == plain
    before = plain.to_dict()
    del before["image"]["pixels"]
    old = Task.from_dict(before)
    assert old.image.pixels is None
    assert old.to_dict() == before
    assert "trained without a rule for 16-bit values" in reason(scan(0), old.image)
    assert "trained without a rule for floating-point" in reason(
        encoded(Image.fromarray(RAMP.astype(np.float32)), "TIFF"), old.image
    )
    colour = replace(COLOUR, pixels=None)
    for name, content in kinds().items():
        if not name.startswith("deep"):
            as_before = Image.open(io.BytesIO(content)).convert("RGB").resize((8, 8), Image.Resampling.BILINEAR)
            assert np.array_equal(read_all([content], ["x"], colour)[0].permute(1, 2, 0), np.asarray(as_before)), name


# Labels of arrays given in Python.


def test_labels_may_be_names():
    x = np.random.default_rng(0).integers(0, 255, (12, 8, 8), dtype=np.uint8)
    y = np.array(["dog", "cat", "emu"] * 4)
    dataset = from_arrays((x, y), (x, y))
    assert dataset.classes == ("cat", "dog", "emu")
    assert dataset.test.labels.tolist() == [1, 0, 2] * 4
    named = from_arrays((x, y.astype(object)), (x, list(y)), classes=["emu", "dog", "cat", "yak"])
    assert named.test.labels.tolist() == [1, 2, 0] * 4
    pairs = [(image, str(label)) for image, label in zip(x, y, strict=True)]

    class Pairs:
        def __len__(self):
            return len(pairs)

        def __getitem__(self, index):
            return pairs[index]

    assert given_data(Pairs(), None).classes == ("cat", "dog", "emu")
    assert given_data(dataset, (x[:3], y[:3])).test.labels.tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    ("y", "classes", "message"),
    [
        (np.arange(12) % 3 + 1, None, "labels go from 1 to 3.*labels - 1"),
        (np.arange(12) % 3 + 1, ["a", "b", "c"], "labels go from 1 to 3"),
        (np.array(["dog", "cat"] * 6), ["dog", "cats"], "'cat' is not among the classes; did you mean 'cats'"),
        (np.array(["dog", 3] * 6, dtype=object), None, "3 is not; give all of them as names"),
        (np.array([None] * 12), None, "whole numbers from 0 to C-1, or class names"),
        (np.arange(12) / 2, None, "whole numbers"),
    ],
)
def test_labels_that_do_not_fit_are_one_line(y, classes, message):
    x = np.zeros((12, 8, 8), dtype=np.uint8)
    with pytest.raises(DataError, match=message) as caught:
        from_arrays((x, y), (x, y), classes=classes)
    assert "\n" not in str(caught.value)


def test_a_named_class_may_be_absent():
    x = np.zeros((12, 8, 8), dtype=np.uint8)
    assert from_arrays((x, np.arange(12) % 2 + 1), classes=["a", "b", "c"]).classes == ("a", "b", "c")
