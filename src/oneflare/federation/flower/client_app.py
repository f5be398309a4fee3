"""The Flower app that a SuperNode runs: it reads the charter and its own data and returns one upload.

Where sums are masked it is asked a second time, for the release that opens the total.

A node's owner decides by `--node-config`: `data` (class folders, table or parquet), `member` (its name), and optionally
`key` (private key to sign with), `federation` (own copy of federation.yaml; other terms are refused), `out` (leave the
upload on disk too, with what resuming needs beside it), `budget` (the most epsilon to spend for an image under private
terms; without it, one answer), `image-column`, `label-column` and `patient-column` of a table or parquet file. What was
answered is kept in the ledger beside the key, or in the home folder.

Under masked sums there are also `mask` (folder of the mask key that `oneflare client join` made; by default beside the
key, or in the home folder) and `reveal` (the one member whose sums may show by the difference of two totals).
`federation` is then needed, because the roster in it is the one that the owner confirmed. A pass phrase comes from the
environment, ONEFLARE_PASS_PHRASE.

What is wrong with the images is told in the node's log alone, because a reply with an error travels to the server and
names of files may name patients.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oneflare.simulation.engines.flower import require_flower

require_flower()

from flwr.app import Context, Message  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402

from oneflare.data.tables import Columns  # noqa: E402
from oneflare.errors import ConfigError, DataError, OneFlareError, did_you_mean  # noqa: E402
from oneflare.federation.charter import FILE, Charter, read_charter, short  # noqa: E402
from oneflare.federation.ledger import Ledger, ledger_folder  # noqa: E402
from oneflare.federation.masked.enrolment import checked_roster  # noqa: E402
from oneflare.federation.masked.release import release as answer_request  # noqa: E402
from oneflare.federation.masked.secret import PASS_PHRASE, MaskSecrets, mask_folder  # noqa: E402
from oneflare.federation.masked.uploading import Masking, check_before_training  # noqa: E402
from oneflare.federation.member import Envelope, make_upload_in, member_data  # noqa: E402
from oneflare.simulation.engines.flower.records import RELEASE, UPLOAD, answer, read_question  # noqa: E402
from oneflare.upload.signing import SigningKey, read_key  # noqa: E402

PATHS = ("key", "federation", "out", "mask")
NAMES = ("member", "reveal", "image-column", "label-column", "patient-column")
KEYS = ("data", "budget", *PATHS, *NAMES)
log = logging.getLogger("flwr")
app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train under the terms the coordinator sent, and reply with the very file that could also be carried by hand."""
    node = Node.of(context.node_config)
    charter = node.charter(str(read_question(message.content).get("charter", "")))
    member, key = node.identity(charter)
    try:
        data, notes, *_ = member_data(charter, node.data, columns=node.columns)
    except DataError as error:
        log.error("%s", error)
        raise DataError(f"{member}'s images cannot be used; the log of its node says why") from None
    masking = node.masking(charter, member)
    if masking is not None:
        check_before_training(charter, member, masking, len(data))
    log.info("%s (%s): %s trains on %d images", charter.name, short(charter.fingerprint), member, len(data))
    for note in notes:
        log.info("note: %s", note)
    with node.target() as out:
        envelope = Envelope(member, key, masking=masking)
        made = make_upload_in(envelope, charter, data, out, ledger=node.ledger())
        content = made.path.read_bytes()
    if made.balance is not None:
        log.info("%s", made.balance.text())
    log.info("%s sends %d bytes, digest %s", member, len(content), made.manifest["digest"][:16])
    return Message(answer({"member": member}, {UPLOAD: content}), reply_to=message)


@app.query()
def release(message: Message, context: Context) -> Message:
    """Answer the request that closed a round of masked sums, with the very file that could also be carried by hand."""
    node = Node.of(context.node_config)
    asked = read_question(message.content)
    charter = node.charter(str(asked.get("charter", "")))
    member, _ = node.identity(charter)
    masking = node.masking(charter, member)
    if masking is None:
        raise ConfigError(f"the sums of {charter.name} are not masked, so there is nothing to release")
    with tempfile.TemporaryDirectory(prefix="oneflare-") as folder:
        request, out = Path(folder) / "request.json", Path(folder) / RELEASE
        request.write_text(str(asked.get("request", "")))
        try:
            made = answer_request(charter, request, out, member, masking, node.reveal)
        except OneFlareError as error:
            raise type(error)(str(error).removeprefix(f"{request}: ")) from None
        content = out.read_bytes()
    here, lost = ", ".join(made.release.shares), ", ".join(made.missing) or "nobody"
    log.info("%s releases what opens the total of %s, and no member's own sums; missing: %s", member, here, lost)
    return Message(answer({"member": member}, {RELEASE: content}), reply_to=message)


@dataclass(frozen=True)
class Node:
    """What a node's owner decided."""

    data: Path
    member: str | None = None
    reveal: str | None = None
    key: Path | None = None
    federation: Path | None = None
    out: Path | None = None
    mask: Path | None = None
    columns: Columns | None = None
    budget: float | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Node:
        for name in config:
            if name not in KEYS:
                raise ConfigError(f"--node-config: unknown key '{name}'{did_you_mean(name, KEYS)}")
        if not config.get("data"):
            raise ConfigError(
                "--node-config: 'data' is missing; say where the images are, such as data=\"/srv/images\""
            )
        paths = {name: Path(str(config[name])).expanduser() for name in PATHS if name in config}
        texts = {name: str(config[name]) for name in NAMES if name in config}
        columns = Columns(*(texts.pop(name, None) for name in NAMES[2:]))
        out = paths.get("out")
        if out is not None and out.suffix != ".safetensors":
            raise ConfigError(f"--node-config: out={out}: an upload's name ends in .safetensors")
        data = Path(str(config["data"])).expanduser()
        given: dict[str, Any] = {**texts, **paths}
        return cls(data, **given, columns=columns, budget=_budget(config.get("budget")))

    def ledger(self) -> Ledger:
        """Where the owner's privacy budget is kept."""
        return Ledger(ledger_folder(self.key), self.budget)

    def charter(self, text: str) -> Charter:
        """The coordinator's terms; if the owner keeps a copy of the charter, they must be the same."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / FILE
            path.write_text(text)
            sent = read_charter(path)
        masked = sent.terms.upload.masked is not None
        if self.federation is None:
            if masked:
                raise ConfigError(
                    f"the sums of {sent.name} are masked, and they are safe with the members that you confirmed; add "
                    'federation="FILE" with the federation.yaml whose roster you compared to --node-config'
                )
            return sent
        own = read_charter(self.federation)
        if own.fingerprint != sent.fingerprint:
            raise ConfigError(
                f"the coordinator's terms ({short(sent.fingerprint)}) are not those of {self.federation} "
                f"({short(own.fingerprint)}); ask the coordinator which are right"
            )
        if masked and checked_roster(own).digest != checked_roster(sent).digest:
            raise ConfigError(
                f"the coordinator's roster ({short(checked_roster(sent).digest)}) is not that of {self.federation} "
                f"({short(checked_roster(own).digest)}); confirm the new one before you replace the file"
            )
        return own if masked else sent

    def masking(self, charter: Charter, member: str) -> Masking | None:
        """The member's mask key, opened; None where sums are not masked."""
        if charter.terms.upload.masked is None:
            return None
        secrets = MaskSecrets(self.mask or mask_folder(self.key, member))
        return Masking(secrets, secrets.key(os.environ.get(PASS_PHRASE)))

    def identity(self, charter: Charter) -> tuple[str, SigningKey | None]:
        key = None if self.key is None else read_key(self.key)
        member = self.member or (None if key is None else charter.member_of(key.public))
        if member is None:
            raise ConfigError('--node-config: say who you are, such as member="north"')
        charter.check_member(member)
        if charter.members.get(member) is not None and key is None:
            raise ConfigError(f'{member}\'s uploads must be signed; add key="PRIVATE KEY" to --node-config')
        return member, key

    @contextlib.contextmanager
    def target(self) -> Iterator[Path]:
        """Where the upload is made; without `out`, nothing is left behind."""
        if self.out is not None:
            yield self.out
            return
        with tempfile.TemporaryDirectory(prefix="oneflare-") as folder:
            yield Path(folder) / UPLOAD


def _budget(value: Any) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigError(f"--node-config: budget={value!r:.40} is not a number of at least 0, such as budget=2")
    return number
