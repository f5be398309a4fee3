"""What one does with a model: predict, evaluate, export, serve, by the real entry points."""

from __future__ import annotations

import base64
import csv
import io
import json
import os
import re
import select
import subprocess
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from hospitals import NAMES, digits, make, rows_of, tiny_charter, typed, write_pngs
from oneflare.errors import ConfigError, RunError
from oneflare.federation.coordinator import fuse_federation
from oneflare.fusion import FUSIONS, build_fusion, load_model
from oneflare.fusion.base import single_network_fusions
from oneflare.metrics import score
from oneflare.models import onnx as exporting
from oneflare.models.onnx import INPUT, LOGITS, PROBABILITIES, TOLERANCE, export_onnx
from shared import COMMAND, SHORT

CHROMIUM = "/usr/bin/chromium"


@pytest.fixture(scope="module")
def federation(tmp_path_factory) -> Path:
    """A fused federation, with test images beside it."""
    root = tmp_path_factory.mktemp("models")
    train, test = digits()
    charter = tiny_charter()
    charter.write(root / "federation" / "federation.yaml")
    for index, name in enumerate(NAMES):
        write_pngs(root / name, train, rows_of(index))
        make(charter, root / name, root / "inbox" / f"{name}.safetensors", name)
    write_pngs(root / "test", test, range(40))
    fuse_federation(root / "federation", uploads=root / "inbox")
    return root / "federation"


@pytest.fixture(scope="module")
def pictures(federation) -> list[Path]:
    return sorted((federation.parent / "test").rglob("*.png"))


def complaints(err: str) -> list[str]:
    """Lines on stderr but the remark whether the model was verified."""
    return [line for line in err.splitlines() if not line.startswith("note: ")]


def test_predict_agrees_with_the_model_in_every_format(federation, pictures, capsys):
    model = load_model(federation / "model.safetensors")
    pixels = torch.stack([torch.from_numpy(np.array(Image.open(path)))[None] for path in pictures])
    probabilities, labels = model.predict_proba(pixels).max(1)
    code, out, _ = typed(capsys, "predict", str(federation), str(federation.parent / "test"), "--json")
    assert code == 0
    rows = json.loads(out)["predictions"]
    assert [row["image"] for row in rows] == [str(path) for path in pictures]
    assert [row["class"] for row in rows] == [str(int(label)) for label in labels]
    assert [row["probability"] for row in rows] == pytest.approx(probabilities.tolist(), abs=5e-6)
    assert all(row["top"][0]["class"] == row["class"] and len(row["top"]) == 3 for row in rows)
    code, out, _ = typed(capsys, "predict", str(federation / "model.safetensors"), str(pictures[0]), "--csv")
    (row,) = csv.DictReader(io.StringIO(out))
    assert row["class"] == rows[0]["class"]
    assert float(row["probability"]) == pytest.approx(rows[0]["probability"], abs=5e-6)
    code, out, _ = typed(capsys, "predict", str(federation), str(pictures[0]))
    assert out.strip() == f"{pictures[0]}  {rows[0]['class']}  {100 * rows[0]['probability']:.1f} %"


def test_predict_takes_images_of_any_size(federation, tmp_path, capsys):
    Image.new("RGB", (300, 20)).save(tmp_path / "wide.jpg")
    Image.new("L", (2, 2)).save(tmp_path / "tiny.png")
    code, out, _ = typed(capsys, "predict", str(federation), str(tmp_path), "--json")
    assert code == 0
    assert len(json.loads(out)["predictions"]) == 2


def test_a_damaged_image_is_named_and_the_others_are_answered(federation, pictures, tmp_path, capsys):
    (tmp_path / "bad.png").write_bytes(pictures[0].read_bytes()[:50])
    code, out, err = typed(capsys, "predict", str(federation), str(tmp_path / "bad.png"), str(pictures[0]), "--json")
    assert code == 2
    (line,) = complaints(err)
    assert "bad.png" in line
    bad, good = json.loads(out)["predictions"]
    assert "error" in bad
    assert "class" in good


def test_evaluate_gives_the_scores_of_the_model(federation, pictures, capsys):
    model = load_model(str(federation / "model.safetensors"))
    pixels = torch.stack([torch.from_numpy(np.array(Image.open(path)))[None] for path in pictures])
    labels = torch.tensor([int(path.parent.name) for path in pictures])
    expected = score(model.logits(pixels), labels)
    folder = str(federation.parent / "test")
    code, out, _ = typed(capsys, "evaluate", str(federation), "--data", folder, "--json")
    assert code == 0
    content = json.loads(out)
    assert content["accuracy"] == expected.accuracy
    assert content["per_class"] == expected.per_class
    code, out, _ = typed(capsys, "evaluate", str(federation), "--data", folder)
    assert f"40 images: accuracy {100 * expected.accuracy:.1f} %" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["predict", "nowhere.safetensors", "x.png"], "no model at"),
        (["predict", "{federation}", "nowhere.png"], "no image at nowhere.png"),
        (["predict", "{federation}", "{federation}"], "no images below"),
        (["predict", "{federation}", "x", "--json", "--csv"], "exclude each other"),
        (["predict", "{federation}/card.md", "x"], "no model at"),
        (["predict", "{federation}/federation.yaml", "x"], "is damaged"),
        (["predict", "{federation}/members", "x"], "neither a federation nor a run"),
        (["evaluate", "{federation}", "--data", "nowhere"], "no data at"),
        (["serve", "{federation}", "--host", "256.0.0.1"], "cannot listen"),
    ],
)
def test_mistakes_are_one_line(words, message, federation, capsys):
    code, out, err = typed(capsys, *(word.format(federation=federation) for word in words))
    assert (code, out) == (2, "")
    (line,) = complaints(err)
    assert line.startswith("error: ")
    assert message in line


def test_export_by_command_and_parity_on_real_images(federation, pictures, tmp_path, capsys):
    import onnxruntime

    code, out, _ = typed(capsys, "export", str(federation), "--onnx", str(tmp_path / "m.onnx"), "--json")
    assert code == 0
    assert json.loads(out)["difference"] <= TOLERANCE
    pixels = torch.stack([torch.from_numpy(np.array(Image.open(path)))[None] for path in pictures])
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    logits, probabilities = session.run([LOGITS, PROBABILITIES], {INPUT: (pixels / 255.0).numpy()})
    model = load_model(federation / "model.safetensors")
    assert np.abs(logits - model.logits(pixels).numpy()).max() <= TOLERANCE
    assert np.abs(probabilities - model.predict_proba(pixels).numpy()).max() <= TOLERANCE
    assert session.get_modelmeta().custom_metadata_map["classes"].split("\n") == [str(c) for c in range(10)]


def test_every_fusion_exports_or_says_which_ones_do(tiny_uploads, tmp_path):
    import onnxruntime

    names = ["average", "ensemble", "feature_mean", "iffi", "robust_prototypes"]  # a fusion of each kind of rule
    images = digits()[1].images[:7]
    for name in names:
        model = build_fusion({"name": name}).fuse(tiny_uploads).model
        complaint = ""
        try:
            export_onnx(model, tmp_path / "m.onnx")
        except ConfigError as error:
            complaint = str(error)
        if complaint:
            assert "single network: " in complaint
            assert "average" in complaint
            assert name not in single_network_fusions()
            continue
        session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
        (probabilities,) = session.run([PROBABILITIES], {INPUT: (images / 255.0).numpy()})
        assert np.abs(probabilities - model.predict_proba(images).numpy()).max() <= TOLERANCE, name
    assert "average" in single_network_fusions()
    assert "ensemble" not in single_network_fusions()


def test_single_network_fusions_are_known_by_what_they_declare():
    """`check_fusion` (tests/test_contracts.py) and tests/test_distill.py compare it with the model of every fusion."""
    declared = {name for name in FUSIONS if FUSIONS[name].factory.single_network}
    assert set(single_network_fusions()) == declared
    assert {"distill_public", "distill_datafree", "coboosting", "average", "ties", "dare"} <= declared
    training = {name for name in FUSIONS if FUSIONS[name].factory.trains}
    assert training == set(SHORT)  # the rest is in test_contracts.py


def test_a_graph_that_disagrees_is_not_written(federation, tmp_path, monkeypatch):
    model = load_model(federation / "model.safetensors")
    monkeypatch.setattr(exporting, "normalise", lambda images, spec: images)
    with pytest.raises(RunError, match="differs from the model"):
        export_onnx(model, tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()


@pytest.fixture(scope="module")
def server(federation):
    """`oneflare serve` in a process of its own on a free port."""
    process = subprocess.Popen(
        [*COMMAND, "serve", str(federation), "--port", "0", "--max-bytes", "100000", "--max-pixels", "250000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        ready, _, _ = select.select([process.stdout], [], [], 240)
        line = process.stdout.readline() if ready else ""
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, line + (process.stderr.read() if process.poll() is not None else "")
        address = found.group()
        for _ in range(200):
            try:
                httpx.get(f"{address}/health", timeout=60)
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        _, complaint = process.communicate(timeout=60)
        assert process.returncode == 0
        assert complaints(complaint) == []


def post(server: str, content: bytes, kind: str = "image/png") -> httpx.Response:
    return httpx.post(f"{server}/predict", content=content, headers={"Content-Type": kind}, timeout=60)


def test_serve_answers_as_predict_does(server, federation, pictures):
    model = load_model(federation / "model.safetensors")
    pixels = torch.stack([torch.from_numpy(np.array(Image.open(path)))[None] for path in pictures[:3]])
    expected = [str(int(label)) for label in model.predict(pixels)]
    contents = [path.read_bytes() for path in pictures[:3]]
    single = [post(server, content).json()["predictions"][0]["class"] for content in contents]
    assert single == expected
    body = json.dumps({"images": [base64.b64encode(content).decode() for content in contents]})
    together = post(server, body.encode(), "application/json").json()["predictions"]
    assert [row["class"] for row in together] == expected
    form = [("image", (path.name, path.read_bytes(), "image/png")) for path in pictures[:3]]
    sent = httpx.post(f"{server}/predict", files=form, timeout=60).json()["predictions"]
    assert [row["class"] for row in sent] == expected
    health = httpx.get(f"{server}/health", timeout=60).json()
    assert health["status"] == "ok"
    assert health["classes"] == [str(c) for c in range(10)]


FORM = "multipart/form-data; boundary=b"


def big_png(side: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("1", (side, side)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"junk", "image/png", 422),
        (b"", "image/png", 400),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 40, "image/png", 422),
        (b"x" * 100_001, "image/png", 413),
        (big_png(600), "image/png", 413),
        (b"{", "application/json", 400),
        (b'{"images": "x"}', "application/json", 400),
        (b'{"images": ["!"]}', "application/json", 400),
        (b'{"images": []}', "application/json", 400),
        (json.dumps({"images": [""] * 65}).encode(), "application/json", 413),
        (b"[" * 1_005, "application/json", 400),
        (b"[" * 50_000, "application/json", 413),
        (b"junk", "multipart/form-data", 400),
        (b"junk", "multipart/form-data; boundary=b", 400),
        (b'--b\r\nContent-Disposition: form-data; name="image"\r\n\r\ntext\r\n--b--\r\n', FORM, 400),
        (b"--b--\r\n", FORM, 400),
    ],
)
def test_serve_refuses_in_one_line(server, content, kind, status):
    reply = post(server, content, kind)
    assert reply.status_code == status
    assert set(reply.json()) == {"error"}
    assert "\n" not in reply.json()["error"]


def test_serve_counts_what_it_did(server, pictures):
    post(server, pictures[0].read_bytes())
    text = httpx.get(f"{server}/metrics", timeout=60).text
    before = int(re.search(r"^oneflare_images_total (\d+)$", text, re.M).group(1))
    post(server, pictures[0].read_bytes())
    post(server, b"junk")
    reply = httpx.get(f"{server}/metrics", timeout=60)
    assert reply.headers["content-type"].startswith("text/plain")
    after = int(re.search(r"^oneflare_images_total (\d+)$", reply.text, re.M).group(1))
    assert after == before + 1
    assert re.search(r'^oneflare_requests_total\{path="/predict",status="422"\} [1-9]', reply.text, re.M)


def test_serve_answers_to_its_own_name_only(server):
    reply = httpx.get(f"{server}/health", headers={"Host": "evil.example"}, timeout=60)
    assert reply.status_code == 421
    assert httpx.get(f"{server}/nothing", timeout=60).status_code == 404


@pytest.mark.skipif(not Path(CHROMIUM).exists(), reason=f"no browser at {CHROMIUM}; install Chromium to test the page")
def test_a_picture_dropped_on_the_page_is_answered(server, federation, pictures):
    """A real browser: dropped, chosen by hand, and one that is no image."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright to test the page")
    model = load_model(federation / "model.safetensors")

    def expected(path: Path) -> str:
        return str(int(model.predict(torch.from_numpy(np.array(Image.open(path)))[None, None])))

    drop = """([zone, content, name]) => {
        const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
        const transfer = new DataTransfer();
        transfer.items.add(new File([bytes], name, {type: 'image/png'}));
        document.querySelector(zone).dispatchEvent(
            new DragEvent('drop', {dataTransfer: transfer, bubbles: true, cancelable: true}));
    }"""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=180_000)
        page = browser.new_page()
        page.set_default_timeout(120_000)
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(server)
        content = base64.b64encode(pictures[0].read_bytes()).decode()
        page.evaluate(drop, ["#drop", content, "a.png"])
        page.wait_for_selector(f".answer:text('{expected(pictures[0])} (')")
        assert page.locator(".top tr").count() == 3
        assert page.is_visible(".preview")
        page.set_input_files("#file", [str(pictures[1]), str(pictures[-1])])
        page.locator(".top").nth(2).wait_for()
        newest = [text.split(" (")[0] for text in page.locator(".answer").all_text_contents()]
        assert newest == [expected(pictures[1]), expected(pictures[-1]), expected(pictures[0])]
        bars = page.eval_on_selector_all(".bar", "bars => bars.map(bar => bar.getBoundingClientRect().width)")
        assert min(bars) > 200
        filled = page.eval_on_selector_all(".fill", "fills => fills.map(fill => fill.getBoundingClientRect().width)")
        shares = [float(text.split()[0]) / 100 for text in page.locator(".share").all_text_contents()]
        assert filled == pytest.approx([bar * share for bar, share in zip(bars, shares, strict=True)], abs=1)
        assert complaints == []
        page.evaluate(drop, ["#drop", base64.b64encode(b"junk").decode(), "b.png"])
        page.wait_for_selector(".answer.bad")
        assert "not an image" in page.inner_text(".answer.bad")
        browser.close()
