"""What the page of a federation tells of files: as seen from its folder, never where the coordinator keeps it."""

from __future__ import annotations

from pathlib import Path

from story_parts import small_federation

from oneflare.federation.coordinator import fuse_federation
from oneflare.federation.page import write_federation_page


def test_the_page_names_files_as_seen_from_the_federations_folder(tmp_path):
    folder, inbox = small_federation(tmp_path).files.folder, tmp_path / "inbox"
    fuse_federation(folder, remove=["north"])
    (inbox / "cut.safetensors").write_bytes((inbox / "east.safetensors").read_bytes()[:2000])
    fused = fuse_federation(folder, uploads=inbox)
    told = {one.who: one.reason for one in fused.content.verdicts if one.status != "in"}
    assert f"--add {inbox / 'north.safetensors'}" in told["north"]  # what the coordinator can type
    page = write_federation_page(fused).read_text()
    assert "--add ../inbox/north.safetensors takes it back" in page
    assert "cut.safetensors" in page
    assert str(tmp_path) not in page
    assert str(Path(tmp_path).resolve()) not in page
