"""`oneflare server scores`, `versions` and `rollback`: what members measured, and which version is in use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oneflare.cli.options import Folder, Json, Quiet

if TYPE_CHECKING:
    from oneflare.federation.history import Version
    from oneflare.federation.scores import PooledScores


def scores(
    folder: Folder,
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILES...", help="Scores that members have sent (JSON), or folders with them."),
    ],
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Take in the scores that members measured with `oneflare evaluate --out`, and show them together.

    Every file is checked: who signed it, for which federation, and of which version of the model it is. What does not
    fit is refused with a line, and the others are taken. They become part of the result, the card and the report.

    [bold]Example[/bold]

      oneflare server scores federation inbox/*.json
    """
    from dataclasses import asdict

    from oneflare.cli import show
    from oneflare.cli.progress import Remarks
    from oneflare.core.plain import plain
    from oneflare.errors import RunError
    from oneflare.federation.publishing import publish
    from oneflare.federation.scoring import collect_scores

    collected = collect_scores(folder, files, None if quiet else Remarks())
    refused = [one for one in collected.verdicts if one.status == "refused"]
    if len(refused) < len(collected.verdicts):
        publish(collected.fused)
    told = collected.fused.content.pooled
    if json:
        members = [] if told is None else [one.to_dict() for one in told.members]
        show.as_json({"verdicts": [asdict(one) for one in collected.verdicts], "scores": members})
    else:
        for one in collected.verdicts:
            if one.status != "refused" and not quiet:
                show.line(plain(f"{one.file}: {one.member}{f' ({one.reason})' if one.reason else ''}"))
            elif one.status == "refused":
                show.note(f"warning: {one.file} is refused: {one.reason}")
        if told is not None and not quiet:
            _together(told)
            show.line(f"card: {collected.fused.files.card}, report: {collected.fused.files.report}")
    if refused:
        many = (
            f"{len(refused)} of {len(collected.verdicts)} files were" if len(collected.verdicts) > 1 else "the file was"
        )
        raise RunError(f"{many} refused; the first: {refused[0].file}: {refused[0].reason}")


def _together(told: PooledScores) -> None:
    """Per member, pooled, worst."""
    from oneflare.cli import show
    from oneflare.cli.evaluating import by_rule, class_lines, gain, percent, summary

    width = max(len(str(one.member)) for one in told.members)
    for one in told.members:
        alone = "" if one.alone is None else f", alone {percent(one.alone.accuracy)}"
        show.line(
            f"  {one.member:<{width}}  {one.together.images} images: accuracy {percent(one.together.accuracy)}{alone}"
        )
    show.line(f"together, {summary(told.together)}")
    if told.together.by_rule is not None:
        show.line(f"as the model decides by its thresholds: {by_rule(told.together)}")
    if told.comparison is not None:
        show.line(gain(told.comparison))
    if len(told.members) > 1:
        show.line(f"worst at {told.worst.member}: accuracy {percent(told.worst.together.accuracy)}")
    for text in class_lines(told.together):
        show.line(text)


def versions(folder: Folder, json: Json = False) -> None:
    """List the versions of the model: when each was made, what changed, how good it is, and which one is in use.

    [bold]Example[/bold]

      oneflare server versions federation
    """
    from oneflare.cli import show
    from oneflare.errors import RunError
    from oneflare.federation.charter import read_charter
    from oneflare.federation.history import History
    from oneflare.federation.versions import FederationFiles

    read_charter(folder)
    history = History.read(FederationFiles(folder).models)
    if json:
        show.as_json(history.to_dict())
        return
    if not history.versions:
        raise RunError(f"{folder} has no version yet; `oneflare server fuse` makes the first")
    for version in history.versions:
        show.line(_version_line(version, in_use=version.number == history.current))


def _version_line(version: Version, *, in_use: bool) -> str:
    from oneflare.cli.evaluating import percent
    from oneflare.federation.page import change_lines

    state = "  in use" if in_use else ""
    words = [f"{version.folder} {version.fused[:16].replace('T', ' ')} UTC{state}: {', '.join(version.members)}"]
    words.append(f"{version.fusion}, model {version.model[:16]}")
    if version.scores is not None:
        words.append(f"accuracy {percent(version.scores.accuracy)} on {version.scores.images} test images of members")
    if version.deleted is not None:
        words.append(f"deleted, because {version.deleted}")
    return "; ".join([*words, *(text.rstrip(".") for text in change_lines(version.change))])


def rollback(
    folder: Folder,
    version: Annotated[
        int | None,
        typer.Argument(metavar="VERSION", min=1, help="Number of the version; default: the one before."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Put an earlier version of the model in use again, with its members, card and scores. Nothing is deleted.

    A version in which somebody is who was removed has been deleted and cannot come back.

    [bold]Examples[/bold]

      oneflare server rollback federation

      oneflare server rollback federation 2
    """
    from oneflare.cli import show
    from oneflare.cli.progress import Remarks
    from oneflare.federation.publishing import publish, roll_back

    fused = roll_back(folder, version, None if quiet else Remarks())
    publish(fused)
    content = fused.content
    show.done(f"version {content.version} of {content.fused[:16].replace('T', ' ')} UTC is in use: {fused.files.model}")
    show.done(f"members: {', '.join(content.names)}; send the model, its .sig and the card to them again")
