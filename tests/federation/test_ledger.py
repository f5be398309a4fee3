"""A member's privacy budget: one answer about an image, the same one as often as anybody asks."""

from __future__ import annotations

import json
import shutil
from multiprocessing import get_context
from pathlib import Path

import pytest

from hospitals import TINY, digits, rows_of, tiny_charter, typed, write_pngs
from oneflare.errors import BudgetError, RunError
from oneflare.federation.ledger import Ledger, ledger_folder
from oneflare.federation.member import make_upload, member_data, work_folder
from oneflare.upload.signing import generate

PRIVATE = {
    "method": "analytic",
    "analytic": {"name": "random_conv", "filters": 3},
    "upload": {"statistics_epsilon": 1.0, "counts": "withheld"},
}
NOISED = TINY | {"upload": {"counts": "noised", "counts_epsilon": 0.5}, "fusions": "count_prototypes"}


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_pngs(folder, digits()[0], rows_of(0, 20))
    return folder


def answer(charter, images: Path, out: Path, ledger: Ledger, **more):
    return make_upload(charter, member_data(charter, images)[0], out, member="north", ledger=ledger, **more)


@pytest.mark.parametrize("settings", [PRIVATE, NOISED])
def test_asked_again_the_same_upload_is_given(settings, images, tmp_path):
    charter, ledger = tiny_charter(settings=settings), Ledger(tmp_path / "ledger")
    first = answer(charter, images, tmp_path / "one" / "n.safetensors", ledger)
    price = settings["upload"].get("statistics_epsilon", 0.5)
    assert (first.balance.epsilon, first.balance.budget) == (price, price)
    shutil.rmtree(work_folder(first.path))  # a Flower node leaves nothing behind
    again = answer(charter, images, tmp_path / "two" / "n.safetensors", ledger)
    assert again.complete_before
    assert again.path.read_bytes() == first.path.read_bytes()
    assert again.balance.epsilon == price
    key = generate(tmp_path / "n.key", tmp_path / "n.pub")
    signed = answer(charter, images, tmp_path / "three" / "n.safetensors", ledger, key=key)
    assert signed.manifest["signature"]["key"] == key.public
    assert signed.manifest["tensors"] == first.manifest["tensors"]  # a new signature, no new noise


def test_other_terms_more_images_or_another_size_do_not_open_the_budget_again(images, tmp_path):
    charter, ledger = tiny_charter(settings=PRIVATE), Ledger(tmp_path / "ledger")
    answer(charter, images, tmp_path / "n.safetensors", ledger)
    out = tmp_path / "other.safetensors"
    with pytest.raises(BudgetError, match=r"budget of 1 for these images 1 is spent.*--budget 2") as caught:
        answer(tiny_charter(settings=PRIVATE), images, out, ledger)
    assert "\n" not in str(caught.value)
    more = shutil.copytree(images, tmp_path / "more")
    write_pngs(more, digits()[0], [500])
    with pytest.raises(BudgetError, match="is refused"):
        answer(charter, more, out, ledger)
    larger = tiny_charter(settings=PRIVATE, image={"size": 9, "channels": 1})
    with pytest.raises(BudgetError, match="perhaps about the same images"):
        answer(larger, images, out, ledger)
    assert not out.exists()
    assert not work_folder(out).exists()
    other = tmp_path / "others"
    write_pngs(other, digits()[0], rows_of(9, 20))
    assert answer(charter, other, out, ledger).balance.epsilon == 1  # other images have a budget of their own
    assert answer(larger, images, tmp_path / "x.safetensors", Ledger(ledger.folder, 3.0)).balance.epsilon == 3


def test_a_member_may_spend_more_and_only_a_member(images, tmp_path):
    ledger = Ledger(tmp_path / "ledger", budget=2.0)
    for name in "ab":
        answer(tiny_charter(settings=PRIVATE), images, tmp_path / f"{name}.safetensors", ledger)
    with pytest.raises(BudgetError, match="2 is spent"):
        answer(tiny_charter(settings=PRIVATE), images, tmp_path / "c.safetensors", ledger)
    dear = tiny_charter(settings=PRIVATE | {"upload": PRIVATE["upload"] | {"statistics_epsilon": 50.0}})
    with pytest.raises(BudgetError, match="epsilon 50 is refused"):
        answer(dear, images, tmp_path / "c.safetensors", Ledger(tmp_path / "new", budget=2.0))


def test_terms_without_a_promise_have_no_ledger(images, tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    assert answer(tiny_charter(), images, tmp_path / "n.safetensors", ledger).balance is None
    assert not ledger.folder.exists()


def test_a_lost_copy_is_taken_from_the_file_that_was_sent(images, tmp_path):
    charter, ledger = tiny_charter(settings=PRIVATE), Ledger(tmp_path / "ledger")
    out = tmp_path / "n.safetensors"
    sent = answer(charter, images, out, ledger).path.read_bytes()
    shutil.rmtree(ledger.folder / "answers")
    assert answer(charter, images, out, ledger).path.read_bytes() == sent
    out.write_bytes(b"rubbish")
    with pytest.raises(BudgetError, match="is refused"):
        answer(charter, images, out, ledger)


@pytest.mark.parametrize("content", ["{", "[]", '{"answers": [{}]}', '{"answers": 3}'])
def test_a_damaged_ledger_is_not_taken_for_an_empty_one(content, images, tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    ledger.folder.mkdir()
    ledger.file.write_text(content)
    with pytest.raises(RunError, match="restore it from a backup"):
        answer(tiny_charter(settings=PRIVATE), images, tmp_path / "n.safetensors", ledger)


def test_the_ledger_lies_beside_the_key_and_the_commands_show_it(images, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    generate(tmp_path / "north.key", tmp_path / "north.pub")
    assert ledger_folder(tmp_path / "north.key") == tmp_path / "north.ledger"
    for name in "ab":
        tiny_charter(settings=PRIVATE).write(tmp_path / f"{name}.yaml")
    words = ["--data", str(images), "--name", "north", "--key", "north.key", "--out", "n.safetensors"]
    code, out, _ = typed(capsys, "client", "train", "a.yaml", *words)
    assert code == 0
    assert "epsilon 1 of 1" in " ".join(out.split())
    code, out, _ = typed(capsys, "client", "budget", "--key", "north.key")
    assert "1 answer under private terms" in " ".join(out.split())
    assert "epsilon 1, delta 1e-05 for 20 images" in " ".join(out.split())
    code, out, error = typed(capsys, "client", "train", "b.yaml", *words[:-1], "m.safetensors", "--quiet")
    assert code == 2
    assert error.count("\n") == 1
    assert "--budget 2" in error
    code, out, _ = typed(capsys, "client", "train", "b.yaml", *words[:-1], "m.safetensors", "--budget", "2", "--json")
    assert json.loads(out)["budget"]["epsilon"] == 2


def _race(charter, images, out, folder) -> None:
    answer(charter, images, out, Ledger(folder))


def test_two_processes_at_once_give_one_answer(images, tmp_path):
    charter, ledger = tiny_charter(settings=PRIVATE), Ledger(tmp_path / "ledger")
    outs = [tmp_path / f"{name}.safetensors" for name in "ab"]
    fork = get_context("fork")
    racers = [fork.Process(target=_race, args=(charter, images, out, ledger.folder)) for out in outs]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert [racer.exitcode for racer in racers] == [0, 0]
    assert len(ledger.answers()) == 1
    assert outs[0].read_bytes() == outs[1].read_bytes()
