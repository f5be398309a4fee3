"""Well-formed uploads that do harm: members are checked by their effect, left out if they fail, capped in weight."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from hospitals import NAMES, digits, make, rows_of, tiny_charter, typed, write_pngs
from oneflare.client.observer import Observer
from oneflare.errors import ConfigError, MemberFault, UploadError
from oneflare.federation.admission import Admission
from oneflare.federation.charter import FILE, read_charter
from oneflare.federation.comparing import unchecked_note
from oneflare.federation.coordinator import fuse_federation
from oneflare.federation.quorum import Rules
from oneflare.fusion import build_fusion, without_faulty
from oneflare.fusion.averaging.laplace import Precision
from oneflare.fusion.trust.influence import capped_influence, capped_say
from oneflare.study.lies import claiming_more, negated_sums, rewritten
from oneflare.upload import read_upload, seal_upload
from shared import hearing

ANALYTIC = {"method": "analytic", "analytic": {"name": "random_conv", "filters": 12}}
MADE = "2026-01-01T00:00:00+00:00"


def swap_folders(folder: Path, first: str, second: str) -> None:
    (folder / first).rename(folder / "x")
    (folder / second).rename(folder / first)
    (folder / "x").rename(folder / second)


@pytest.fixture(scope="module")
def ward(tmp_path_factory) -> Path:
    """Three honest members, images of the coordinator's own, and mallory, who swapped two folders and claims more."""
    root = tmp_path_factory.mktemp("ward")
    train, test = digits()
    charter = tiny_charter(settings=ANALYTIC)
    charter.write(root / "federation" / FILE)
    for number, name in enumerate(NAMES):
        write_pngs(root / "data" / name, train, rows_of(number, 120))
        make(charter, root / "data" / name, root / "inbox" / f"{name}.safetensors", name)
    write_pngs(root / "data" / "mallory", train, rows_of(3, 120))
    swap_folders(root / "data" / "mallory", "3", "7")
    plain = make(charter, root / "data" / "mallory", root / "mallory.safetensors", "mallory")
    seal(rewritten(read_upload(plain, charter.contract), root / "claims", claiming_more), plain)
    write_pngs(root / "own", test, range(240))
    fuse_federation(root / "federation", uploads=root / "inbox")
    return root


def seal(source: Path, target: Path) -> None:
    seal_upload(source, target, member="mallory", created=MADE)


def copy_of(ward: Path, place: Path) -> Path:
    shutil.copytree(ward / "federation", place)
    return place


def files_of(folder: Path) -> dict[str, bytes]:
    """All that a fusion changes; what was tried is written into the log all the same."""
    files = (
        path for path in folder.rglob("*") if path.is_file() and path.name != ".lock" and path.parent.name != "log"
    )
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_member_that_costs_a_class_needs_approval(ward, tmp_path, capsys):
    federation = copy_of(ward, tmp_path / "federation")
    before = files_of(federation)
    words = ["server", "fuse", str(federation), "--add", str(ward / "mallory.safetensors")]
    checked = [*words, "--check-images", str(ward / "own")]
    code, _, said = typed(capsys, *checked)
    assert code == 2
    error = said.splitlines()[-1]
    assert "mallory takes class '" in error
    assert "nothing was changed" in error
    assert "--remove mallory" in error
    assert "--approve mallory" in error
    assert files_of(federation) == before
    assert "did you mean 'mallory'" in typed(capsys, *checked, "--approve", "malory")[2]
    assert "leave --approve out" in typed(capsys, *words, "--no-compare", "--approve", "mallory")[2]
    assert files_of(federation) == before
    code, _, said = typed(capsys, *checked, "--approve", "mallory")
    assert code == 0
    assert "approved: mallory takes class '" in said
    assert files_of(federation) != before


def test_without_images_a_member_that_exchanged_two_classes_needs_approval(ward, tmp_path, capsys):
    federation = copy_of(ward, tmp_path / "federation")
    before = files_of(federation)
    words = ["server", "fuse", str(federation), "--add", str(ward / "mallory.safetensors")]
    code, _, said = typed(capsys, *words)
    assert code == 2
    error = said.splitlines()[-1]
    assert "mallory calls '3' what east, north and south know as '7', and the reverse (agreement -" in error
    assert "nothing was changed. Ask them whether two classes were exchanged" in error
    assert "--remove mallory fuses without them, --approve mallory accepts it" in error
    assert files_of(federation) == before
    code, out, said = typed(capsys, *words, "--approve", "mallory", "--json")
    assert code == 0
    assert "approved: mallory calls '3' what" in said
    (found,) = json.loads(out.splitlines()[-1])["admission"]["contradictions"]
    assert found["members"] == ["mallory"]
    assert found["classes"] == ["3", "7"]
    assert found["agreement"] < -0.5
    assert min(found["share"]) > 50
    assert "--approve mallory" in (federation / "log" / "entries.jsonl").read_text()


def test_of_two_members_that_contradict_each_other_nobody_knows_which_is_right(ward, tmp_path, capsys):
    federation = copy_of(ward, tmp_path / "federation")
    words = ["server", "fuse", str(federation), "--remove", "east", "--remove", "south", "--min-members", "1"]
    words += ["--add", str(ward / "mallory.safetensors")]
    code, _, said = typed(capsys, *words)
    assert code == 2
    error = said.splitlines()[-1]
    assert "contradict each other about which is '3' and which is '7'" in error
    assert "nobody else can say which of them is right" in error
    assert "--remove north" in error
    assert "--remove mallory" in error
    assert typed(capsys, *words, "--approve", "mallory")[0] == 2
    assert typed(capsys, *words, "--approve", "mallory", "--approve", "north")[0] == 0
    assert typed(capsys, *words, "--no-compare")[0] == 0


def test_classes_with_one_owner_are_said_to_be_unchecked(tmp_path, capsys):
    """North alone has enough images of 3, which nobody can contradict."""
    train, _ = digits()
    charter = tiny_charter(settings=ANALYTIC)
    charter.write(tmp_path / "federation" / FILE)
    for number, name in enumerate(NAMES[:2]):
        rows = [row for row in rows_of(number, 200) if name == "north" or int(train.labels[row]) != 3]
        write_pngs(tmp_path / name, train, rows)
        make(charter, tmp_path / name, tmp_path / "inbox" / f"{name}.safetensors", name)
    code, out, said = typed(
        capsys, "server", "fuse", str(tmp_path / "federation"), "--uploads", str(tmp_path / "inbox"), "--json"
    )
    assert code == 0, said
    note = "nobody else has 10 images of these classes, so their labels cannot be checked: '3' of north"
    assert note in said
    assert json.loads(out.splitlines()[-1])["admission"]["unchecked"] == {"north": ["3"]}
    many = {f"member{number}": ("a", "b") for number in range(8)}
    assert unchecked_note(many).endswith("'a' and 'b' of member5; those of 2 more members")


def test_honest_members_need_no_approval_and_the_result_says_what_was_checked(ward, tmp_path, capsys):
    federation = copy_of(ward, tmp_path / "federation")
    code, out, _ = typed(capsys, "server", "fuse", str(federation), "--check-images", str(ward / "own"), "--json")
    assert code == 0
    assert '"effects": []' in out
    assert '"images": 240' in out


def test_without_images_the_statistics_name_who_swapped_which_classes(ward, tmp_path):
    said: list[str] = []
    federation = copy_of(ward, tmp_path / "federation")
    approved = Rules(admission=Admission(approved=("mallory",)))
    added = [ward / "mallory.safetensors"]
    content = fuse_federation(federation, add=added, rules=approved, observer=hearing(said)).content
    assert list(content.suspects) == ["mallory"]
    (warning,) = [line for line in said if "is suspect" in line]
    assert "its images of '3' look like the others' '7' and its images of '7' look like the others' '3'" in warning
    assert "--remove mallory" in warning
    charter = read_charter(federation)
    uploads = [read_upload(path, charter.contract) for path in sorted((federation / "members").glob("*.safetensors"))]
    from oneflare.fusion import UploadSet

    everybody = UploadSet(tuple(uploads), charter.contract, charter.template())
    honest = dataclasses.replace(everybody, uploads=tuple(u for u in uploads if u.member != "mallory"))
    robust = build_fusion({"name": "analytic", "leave_out": True}).fuse(everybody)
    plain = build_fusion({"name": "analytic"}).fuse(everybody)
    without = build_fusion({"name": "analytic"}).fuse(honest)
    images = digits()[1].images[:50]
    assert torch.allclose(robust.model.logits(images), without.model.logits(images), atol=1e-3)
    (mallory,) = [upload.client for upload in uploads if upload.member == "mallory"]
    assert [(one.client, one.treatment) for one in robust.suspects] == [(mallory, "left out")]
    assert str(robust.suspects[0]).startswith(f"client {mallory} is suspect and is left out: its images of '3'")
    assert [(one.client, one.treatment) for one in plain.suspects] == [(mallory, "kept")]
    assert str(plain.suspects[0]).startswith(f"client {mallory} is suspect: its images of '3'")


def test_sums_that_no_images_could_give_are_refused_by_name(ward, tmp_path):
    federation = copy_of(ward, tmp_path / "federation")
    charter = read_charter(federation)
    own = read_upload(ward / "mallory.safetensors", charter.contract)
    seal(rewritten(own, tmp_path / "lie", negated_sums), tmp_path / "mallory.safetensors")
    content = fuse_federation(federation, add=[tmp_path / "mallory.safetensors"]).content
    assert list(content.names) == list(NAMES)
    (verdict,) = [verdict for verdict in content.verdicts if verdict.member == "mallory"]
    assert verdict.status == "refused"
    assert "statistics.sums has a class mean of" in verdict.reason


def test_a_file_that_changes_while_it_is_fused_is_refused_and_the_others_are_fused(ward, tmp_path):
    """North cuts its file short between the check and the fusion."""
    inbox, said = tmp_path / "inbox", []
    shutil.copytree(ward / "inbox", inbox)
    (tmp_path / "federation").mkdir()
    shutil.copy(ward / "federation" / FILE, tmp_path / "federation" / FILE)

    class Cutting(Observer):
        def note(self, text: str) -> None:
            said.append(text)
            if text.startswith("fusing 3"):
                with (inbox / "north.safetensors").open("r+b") as file:
                    file.truncate(5000)

    content = fuse_federation(tmp_path / "federation", uploads=inbox, observer=Cutting()).content
    assert list(content.names) == ["east", "south"]
    (verdict,) = [verdict for verdict in content.verdicts if verdict.member == "north"]
    assert verdict.status == "refused"
    assert "not a valid safetensors file" in verdict.reason
    assert any(line.startswith("north is refused, and everybody else was fused again") for line in said)
    assert sorted(path.stem for path in (tmp_path / "federation" / "members").glob("*")) == ["east", "south"]


def test_work_goes_on_without_whoever_is_at_fault(tiny_uploads):
    first, second, third = (upload.client for upload in tiny_uploads)

    def work(kept):
        clients = [upload.client for upload in kept]
        for client in (second, first):
            if client in clients:
                raise MemberFault(client, f"{client} fails")
        return clients

    result, faults = without_faulty(tiny_uploads, work)
    assert result == [third]
    assert [fault.client for fault in faults] == [second, first]

    def hopeless(kept):
        raise MemberFault(kept.uploads[0].client, "fails")

    with pytest.raises(UploadError, match="no upload is left to fuse"):
        without_faulty(tiny_uploads, hopeless)

    def together(kept):
        return torch.linalg.cholesky(-torch.eye(2))

    with pytest.raises(UploadError, match="no single one is at fault"):
        without_faulty(tiny_uploads, together)


def test_numbers_that_cannot_be_calculated_with_are_their_members_fault(tiny_uploads):
    upload = tiny_uploads.uploads[1]
    indefinite = Precision(1.0, torch.eye(2).double(), torch.diag(torch.tensor([1.0, -1.0])).double())
    with pytest.raises(MemberFault, match="cannot be calculated with") as caught, upload.blamed():
        indefinite.check()
    assert caught.value.client == upload.client


@pytest.mark.parametrize(
    ("claims", "share", "expected"),
    [
        ([10, 10, 690], 0.5, [10, 10, 20]),
        ([10, 10, 10], 0.5, [10, 10, 10]),
        ([690, 10, 0], 0.5, [10, 10, 0]),
        ([5, 0, 0], 0.1, [5, 0, 0]),
        ([100, 90, 10], 0.1, [10, 10, 10]),
        ([700, 20, 10], 1.0, [700, 20, 10]),
        ([0, 0, 0], 0.5, [0, 0, 0]),
    ],
)
def test_no_member_has_more_than_its_share_of_a_class(claims, share, expected):
    capped = capped_influence(torch.tensor(claims).double()[:, None], share)[:, 0]
    assert torch.allclose(capped, torch.tensor(expected).double())


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([100, 100, 4900], 0.34, [10, 10, 20 * 0.34 / 0.66]),
        ([100, 4900], 0.34, [10, 70]),
        ([100, 4900, 4], 0.34, [10, 70, 2]),
        ([100, 100, 4900, 4], 0.34, [10, 10, 20 * 0.34 / 0.66, 2]),
        ([100, 100, 4900], None, [10, 10, 70]),
    ],
)
def test_a_claim_to_many_images_gives_no_more_say_than_its_share(counts, share, expected):
    say = capped_say(torch.tensor(counts).double()[:, None], share)[:, 0]
    assert torch.allclose(say, torch.tensor(expected).double())


def test_a_new_charter_bounds_what_one_member_says_about_a_class():
    (fusion,) = tiny_charter(settings={"method": "flare"}).terms.fusions
    assert fusion["name"] == "density_ratio"
    assert (fusion["class_share"], fusion["spread_cap"]) == (0.34, 2.0)
    (named,) = tiny_charter(settings={"method": "flare", "fusions": ["density_ratio"]}).terms.fusions
    assert named["class_share"] is None
    with pytest.raises(ConfigError, match="class_share: must be above 0 and at most 1"):
        build_fusion({"name": "density_ratio", "class_share": 1.5})


def test_the_share_is_an_option_of_the_robust_fusion(tiny_uploads):
    images = torch.rand(8, 1, 8, 8)
    free, capped = (
        build_fusion({"name": "robust_prototypes", "class_share": share}).fuse(tiny_uploads).model.logits(images)
        for share in (1.0, 0.34)
    )
    assert not torch.allclose(free, capped)
    with pytest.raises(ConfigError, match="class_share: must be above 0 and at most 1"):
        build_fusion({"name": "robust_prototypes", "class_share": 0.0})
