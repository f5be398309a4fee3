"""DICOM files: values, windows, colours, frames, what is refused, and that nobody's name leaves the file."""

from __future__ import annotations

import io
import json
import logging
import struct
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pydicom import Dataset, config, dcmwrite
from pydicom.dataset import FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.pixels import apply_modality_lut, apply_voi_lut, apply_windowing, convert_color_space
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEGBaseline8Bit,
    JPEGLosslessSV1,
    RLELossless,
    SecondaryCaptureImageStorage,
    generate_uid,
)

from hospitals import TINY, tiny_charter, typed
from oneflare.core.config import Pixels
from oneflare.data import ImageSpec
from oneflare.data.dicom import voi_window
from oneflare.data.images import ImageFiles, Tally, decode_all, is_grey, shape_of
from oneflare.data.reading import read_all
from oneflare.errors import DataError

RAMP = np.arange(64).reshape(8, 8)
SECRETS = ("Doe^Jane", "19700101", "MRN-4711", "Doctor^Who", "St. Elsewhere")


def spec(channels: int = 1, **rule) -> ImageSpec:
    return ImageSpec.default(channels, 8, Pixels(**rule))


def header(pixels: np.ndarray, *, frames: int | None = None, colour: bool = False, **tags) -> Dataset:
    """A data set with a patient in it, whose pixels are not yet written."""
    data = Dataset()
    data.PatientName, data.PatientBirthDate, data.PatientID, data.ReferringPhysicianName, data.InstitutionName = SECRETS
    data.SOPClassUID, data.SOPInstanceUID = SecondaryCaptureImageStorage, generate_uid()
    data.Rows, data.Columns = pixels.shape[-3:-1] if colour else pixels.shape[-2:]
    data.SamplesPerPixel, data.PhotometricInterpretation = (3, "RGB") if colour else (1, "MONOCHROME2")
    if colour:
        data.PlanarConfiguration = 0
    if frames is not None:
        data.NumberOfFrames = frames
    data.BitsAllocated = 8 * pixels.dtype.itemsize
    data.BitsStored, data.HighBit = data.BitsAllocated, data.BitsAllocated - 1
    data.PixelRepresentation = int(pixels.dtype.kind == "i")
    for name, value in tags.items():
        setattr(data, name, value)
    if "BitsStored" in tags:
        data.HighBit = tags.get("HighBit", tags["BitsStored"] - 1)
    return data


def written(data: Dataset, content: bytes | None, syntax=ExplicitVRLittleEndian) -> bytes:
    data.file_meta = FileMetaDataset()
    data.file_meta.TransferSyntaxUID = syntax
    if content is not None:
        data.PixelData = content
        data["PixelData"].VR = "OW" if data.BitsAllocated > 8 else "OB"
        data["PixelData"].is_undefined_length = syntax.is_compressed and syntax != DeflatedExplicitVRLittleEndian
    buffer = io.BytesIO()
    dcmwrite(buffer, data, enforce_file_format=True)
    return buffer.getvalue()


def dicom(pixels: np.ndarray, syntax=ExplicitVRLittleEndian, **tags) -> bytes:
    stored = pixels.astype(pixels.dtype.newbyteorder(">")) if syntax == ExplicitVRBigEndian else pixels
    return written(header(pixels, **tags), stored.tobytes(), syntax)


def seen(content: bytes, image: ImageSpec) -> np.ndarray:
    return read_all([content], ["scan"], image)[0, 0].numpy()


def reason(content: bytes, image: ImageSpec | None = None) -> str:
    with pytest.raises(DataError) as caught:
        read_all([content], ["scan.dcm"], image or spec())
    text = str(caught.value)
    assert text.startswith("cannot read image scan.dcm: ")
    assert "\n" not in text
    assert not any(secret in text for secret in SECRETS)
    return text


def notes(content: bytes, image: ImageSpec) -> str:
    tally = Tally(image)
    _, damaged = decode_all(ImageFiles([content], ["scan"]), image, tally)
    assert not damaged
    return "; ".join(tally.notes())


CT = (RAMP * 40).astype(np.uint16)
HOUNSFIELD = {"RescaleSlope": 1, "RescaleIntercept": -1024}


@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, ImplicitVRLittleEndian, ExplicitVRBigEndian, RLELossless])
def test_values_are_rescaled_and_the_window_of_the_terms_wins(syntax):
    tags = {**HOUNSFIELD, "WindowCenter": 40, "WindowWidth": 400}
    if syntax == RLELossless:
        data = header(CT, **tags)
        data.PixelData = CT.tobytes()
        data.file_meta = FileMetaDataset()
        data.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        data.compress(RLELossless)
        content = written(data, data.PixelData, RLELossless)
    else:
        content = dicom(CT, syntax, **tags)
    expected = ((CT - 1024.0 + 1000) / 2000).clip(0, 1) * 255
    assert np.abs(seen(content, spec(low=-1000, high=1000)) - expected).max() <= 0.51
    said = notes(content, spec(low=-1000, high=1000))
    assert "were scaled from more than 8 bits to brightness by the window -1000 to 1000" in said
    assert "own files" not in said
    assert "values outside the window -1000 to 1000, which were clipped" in said


def test_without_terms_the_files_own_window_is_used_and_said():
    content = dicom(CT, **HOUNSFIELD, WindowCenter=[40, 300], WindowWidth=[400, 1500])
    expected = ((CT - 1024.0 - 39.5) / 399 + 0.5).clip(0, 1) * 255
    assert np.abs(seen(content, spec()) - expected).max() <= 0.51
    assert "are shown by the window in their own files" in notes(content, spec())
    bare = dicom(CT, **HOUNSFIELD)
    assert "no rule says how its 16-bit values (-1024 to 1496) become brightness" in reason(bare)
    assert "do not fit in pixels.bits=12" in reason(bare, spec(bits=12))
    assert "trained without a rule for DICOM" in reason(bare, ImageSpec(1, 8, (0.5,), (0.5,), None))
    assert "width -3" in reason(dicom(CT, WindowCenter=40, WindowWidth=-3))


@settings(max_examples=40, deadline=None)
@given(
    st.floats(-500, 500), st.floats(1, 900), st.sampled_from(["LINEAR", "LINEAR_EXACT", "SIGMOID"]), st.integers(0, 9)
)
def test_windows_are_those_of_the_standard(centre, width, function, seed):
    values = np.random.default_rng(seed).integers(-1000, 1000, (8, 8)).astype(np.int16)
    data = header(values, WindowCenter=centre, WindowWidth=width, VOILUTFunction=function)
    with config.disable_value_validation(), np.errstate(over="ignore"):
        shown = apply_windowing(values, data)
    unit = (shown + 32768) / 65535
    ours = voi_window(float(data.WindowCenter), float(data.WindowWidth), function)(values.astype(np.float64))
    assert np.abs(ours - unit).max() < 1e-5


def table_item(entries: np.ndarray, first: int, bits: int) -> Dataset:
    item = Dataset()
    item.LUTDescriptor = [len(entries), first, bits]
    item["LUTDescriptor"].VR = "US"
    item.LUTData = [int(value) for value in entries]
    item["LUTData"].VR = "US"
    return item


def test_lookup_tables_agree_with_pydicom():
    entries = (np.arange(40) ** 2 * 30).astype(np.uint16)
    raw = RAMP.astype(np.uint16)
    for tags, oracle in (
        ({"VOILUTSequence": [table_item(entries, 10, 16)]}, lambda data: apply_voi_lut(raw, data) / 65535),
        (
            {"ModalityLUTSequence": [table_item(entries, 10, 16)], "WindowCenter": 9000, "WindowWidth": 15000},
            lambda data: ((apply_modality_lut(raw, data) - 8999.5) / 14999 + 0.5).clip(0, 1),
        ),
    ):
        data = header(raw, **tags)
        expected = oracle(data) * 255
        assert np.abs(seen(written(data, raw.tobytes()), spec()) - expected).max() <= 0.51


def test_monochrome1_signed_values_and_unused_bits():
    ramp8 = (RAMP * 4).astype(np.uint8)
    assert np.array_equal(seen(dicom(ramp8), spec()), ramp8)
    inverted = dicom(ramp8, PhotometricInterpretation="MONOCHROME1")
    assert np.array_equal(seen(inverted, spec()), 255 - ramp8)
    assert "store white as the smallest value and were inverted" in notes(inverted, spec())
    signed = (RAMP * 10 - 300).astype(np.int16)
    expected = RAMP / 63 * 255
    assert np.abs(seen(dicom(signed), spec(low=-300, high=330)) - expected).max() <= 0.51
    twelve = signed & 0xFFF | 0x5000  # an overlay in the bits above
    assert np.abs(seen(dicom(twelve, BitsStored=12), spec(low=-300, high=330)) - expected).max() <= 0.51
    overlaid = CT | 0xE000
    assert np.abs(seen(dicom(overlaid, BitsStored=12), spec(bits=12)) - CT / 4095 * 255).max() <= 0.51
    assert "HighBit" in reason(dicom(CT, BitsStored=12, HighBit=13), spec(bits=12))
    assert "rescale slope is 0" in reason(dicom(CT, RescaleSlope=0, RescaleIntercept=3), spec(bits=12))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vast = dicom(CT, RescaleSlope="1e308", RescaleIntercept="1e308")
        assert "not finite" in reason(vast, spec(bits=12))


def test_eight_bits_keep_their_scale_and_their_own_window():
    ramp8 = (RAMP * 4).astype(np.uint8)
    content = dicom(ramp8)
    assert np.array_equal(seen(content, spec(low=600, high=3700)), ramp8)
    shown = dicom(ramp8, WindowCenter=101, WindowWidth=101)
    assert np.abs(seen(shown, spec()) - ((ramp8 - 100.5) / 100 + 0.5).clip(0, 1) * 255).max() <= 0.51
    six = dicom((RAMP).astype(np.uint8), BitsStored=6)
    assert np.abs(seen(six, spec()) - RAMP / 63 * 255).max() <= 0.51


def test_colours():
    rng = np.random.default_rng(3)
    rgb = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    content = dicom(rgb, colour=True)
    assert np.array_equal(read_all([content], ["x"], spec(3))[0].permute(1, 2, 0), rgb)
    assert is_grey(content) is False
    assert shape_of(content) == (8, 8, False)
    assert "are in colour and were turned grey" in notes(content, spec(1))
    grey = np.asarray(Image.fromarray(rgb).convert("L"))
    assert np.array_equal(seen(content, spec(1)), grey)
    planes = written(header(rgb, colour=True, PlanarConfiguration=1), np.moveaxis(rgb, 2, 0).tobytes())
    assert np.array_equal(read_all([planes], ["x"], spec(3))[0].permute(1, 2, 0), rgb)
    ybr = convert_color_space(rgb, "RGB", "YBR_FULL")
    content = dicom(ybr, colour=True, PhotometricInterpretation="YBR_FULL")
    back = read_all([content], ["x"], spec(3))[0].permute(1, 2, 0).numpy().astype(int)
    assert np.abs(back - rgb).max() <= 3
    deep = dicom((rgb.astype(np.uint16) << 8) | 7, colour=True)
    assert "16 bits per colour" in reason(deep, spec(3))
    assert np.array_equal(read_all([deep], ["x"], spec(3, bits=16))[0].permute(1, 2, 0), rgb)
    assert "other colours than grey, RGB or YBR" in reason(dicom(CT, PhotometricInterpretation="PALETTE COLOR"))


def test_frames_are_refused_or_chosen():
    frames = np.stack([CT, CT + 100, CT + 200]).astype(np.uint16)
    content = dicom(frames, frames=3)
    assert "more than one page or frame" in reason(content, spec(bits=12))
    for page, which in ((1, 0), (3, 2), ("middle", 1)):
        assert np.abs(seen(content, spec(bits=12, page=page)) - frames[which] / 4095 * 255).max() <= 0.51
    assert "the middle one was read" in notes(content, spec(bits=12, page="middle"))
    assert "fewer than 4 pages" in reason(content, spec(bits=12, page=4))


def test_enhanced_files_say_their_scale_by_frame():
    frames = np.stack([CT, CT]).astype(np.uint16)

    def group(intercept):
        item, macro = Dataset(), Dataset()
        macro.RescaleSlope, macro.RescaleIntercept = 1, intercept
        item.PixelValueTransformationSequence = [macro]
        return item

    shared, voi = Dataset(), Dataset()
    voi.WindowCenter, voi.WindowWidth = 1000.5, 2001
    shared.FrameVOILUTSequence = [voi]
    tags = {
        "SharedFunctionalGroupsSequence": [shared],
        "PerFrameFunctionalGroupsSequence": [group(0), group(500)],
    }
    content = dicom(frames, frames=2, **tags)
    for page, intercept in ((1, 0), (2, 500)):
        expected = ((CT + intercept) / 2000).clip(0, 1) * 255
        assert np.abs(seen(content, spec(page=page)) - expected).max() <= 0.51


def test_jpeg_inside_and_compressions_without_a_decoder():
    picture = Image.fromarray((RAMP * 4).astype(np.uint8))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=95)
    data = header(np.zeros((8, 8), np.uint8))
    content = written(data, encapsulate([buffer.getvalue()]), JPEGBaseline8Bit)
    assert np.abs(seen(content, spec()).astype(int) - RAMP * 4).max() <= 8
    lossless = written(header(np.zeros((8, 8), np.uint8)), encapsulate([buffer.getvalue()]), JPEGLosslessSV1)
    assert "no decoder is installed" in reason(lossless)
    assert "JPEG Lossless" in reason(lossless)
    bomb, place = bytearray(buffer.getvalue()), buffer.getvalue().index(b"\xff\xc0")
    bomb[place + 5 : place + 9] = struct.pack(">HH", 60_000, 60_000)  # height and width that the JPEG states
    reason(written(header(np.zeros((8, 8), np.uint8)), encapsulate([bytes(bomb)]), JPEGBaseline8Bit))


def test_what_cannot_be_shown_is_refused_in_one_line():
    content = dicom(CT, WindowCenter=40, WindowWidth=400)
    for cut in (len(content) - 1, len(content) - 60, len(content) // 2, 400, 200, 140, 132):
        reason(content[:cut])
    nothing = header(CT)
    assert "without pixels" in reason(written(nothing, None))
    del nothing.Rows
    assert "without an image (it has no Rows)" in reason(written(nothing, None))
    enormous = header(CT, Rows=60_000, Columns=60_000)
    assert "limit of 80,000,000" in reason(written(enormous, CT.tobytes()))
    assert "states 8x0 pixels" in reason(written(header(CT, Rows=0), CT.tobytes()))
    deflated = dicom(CT, DeflatedExplicitVRLittleEndian)
    assert "deflated" in reason(deflated)
    rng = np.random.default_rng(0)
    for _ in range(150):
        damaged = bytearray(content)
        for place in rng.integers(132, len(content) - 128, 3):
            damaged[place] = rng.integers(0, 256)
        _, refused = decode_all(ImageFiles([bytes(damaged)], ["scan"]), spec())
        assert not any(secret in str(row) for row in refused.values() for secret in SECRETS)


def test_without_pydicom_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'oneflare[dicom]'" in reason(dicom(CT))


def test_nothing_about_the_patient_is_read_or_said(caplog, capfd):
    data = header(CT, WindowCenter=40, WindowWidth=400, BurnedInAnnotation="YES")
    with warnings.catch_warnings(), config.disable_value_validation():
        warnings.simplefilter("ignore")
        data.PatientID = "MRN-4711" + "\t\x01x" * 40  # a value that pydicom complains about
        data.PatientBirthDate = "MRN-4711-1970"
        data.SOPInstanceUID = "MRN-4711"
        data.file_meta = FileMetaDataset()
        content = written(data, CT.tobytes())
    caplog.clear()
    tally = Tally(spec())
    with caplog.at_level(logging.DEBUG, "pydicom"):
        decode_all(ImageFiles([content, content[:-5]], ["a", "b"]), spec(), tally)
    told = " ".join((*tally.notes(), caplog.text, *capfd.readouterr()))
    assert "1 of 1 images say that text is burned into their pixels" in told
    assert not any(secret in told for secret in (*SECRETS, "MRN", "1970"))


def test_bytes_paths_and_threads_agree(tmp_path):
    contents = [dicom(CT + row, WindowCenter=700 + row, WindowWidth=900) for row in range(12)]
    for row, content in enumerate(contents):
        (tmp_path / f"1.2.840.{row}").write_bytes(content)
    paths = [tmp_path / f"1.2.840.{row}" for row in range(12)]
    together = read_all(paths, [str(path) for path in paths], spec())
    assert torch.equal(together, torch.cat([read_all([content], ["x"], spec()) for content in contents]))


def test_a_hospital_trains_and_predicts_on_its_own_kinds_of_files(tmp_path, capsys):
    """One scene as 16-bit PNG, float TIFF and DICOM gives one answer, and nobody's name leaves."""
    rng = np.random.default_rng(0)
    rows = ["file,label,patient"]
    for number in range(24):
        scene = (rng.normal(1500 + 900 * (number % 2), 300, (20, 20))).clip(0, 4095).astype(np.uint16)
        kind = number // 2 % 4
        name = f"{number}.{('png', 'tif', 'dcm', '840')[kind]}"
        path = tmp_path / "scans" / name
        path.parent.mkdir(exist_ok=True)
        if kind < 2:
            Image.fromarray(scene if kind == 0 else scene.astype(np.float32)).save(path)
        else:
            path.write_bytes(dicom(scene, BitsStored=12, WindowCenter=100, WindowWidth=50))
        rows.append(f"{name},{'ab'[number % 2]},MRN-{number // 4}")
    (tmp_path / "scans" / "labels.csv").write_text("\n".join(rows))
    scene = (RAMP * 60).astype(np.uint16)
    same = tmp_path / "same"
    same.mkdir()
    Image.fromarray(scene).save(same / "1.png")
    Image.fromarray(scene.astype(np.float32)).save(same / "2.tif")
    (same / "3.dcm").write_bytes(dicom(scene))
    (same / "4").write_bytes(dicom(4095 - scene, PhotometricInterpretation="MONOCHROME1"))
    settings = TINY | {"train": TINY["train"] | {"holdout": 0.2}}
    image = {"size": 8, "channels": 1, "pixels": {"low": 0, "high": 4095}}
    tiny_charter(classes=["a", "b"], image=image, settings=settings).write(tmp_path / "federation.yaml")
    words = ["client", "train", str(tmp_path / "federation.yaml"), "--data", str(tmp_path / "scans")]
    code, out, _ = typed(capsys, *words, "--dry-run")
    assert code == 0
    assert "found: 6 PNG, 6 TIFF, 12 DICOM; 6 patients; 20x20 pixels; 0 damaged" in out
    upload = tmp_path / "u.safetensors"
    code, out, err = typed(capsys, *words, "--name", "north", "--out", str(upload))
    assert code == 0, err
    assert "the images belong to 6 patients" in err
    code, answers, err = typed(capsys, "predict", str(upload), str(same), "--json")
    assert code == 0, err
    rows = json.loads(answers)["predictions"]
    assert len(rows) == 4
    assert len({(row["class"], row["probability"]) for row in rows}) == 1
    code, measured, _ = typed(capsys, "evaluate", str(upload), "--data", str(tmp_path / "scans"), "--json")
    assert code == 0
    assert json.loads(measured)["images"] == {"a": 12, "b": 12}
    code, listed, _ = typed(capsys, "predict", str(upload), str(tmp_path / "scans" / "labels.csv"), "--json")
    assert code == 0
    assert len(json.loads(listed)["predictions"]) == 24
    for left in (upload.read_bytes(), out.encode(), *(path.read_bytes() for path in tmp_path.rglob("u.work/*.json"))):
        assert not any(secret.encode() in left for secret in (*SECRETS, "MRN-"))
