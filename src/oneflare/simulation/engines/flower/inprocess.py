"""A Flower grid in threads of this process, without sockets or Ray, for tests."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

RUN = 1


class InProcessGrid(Grid):
    """Nodes 1 to n, each with its own configuration; every message passes through Flower's wire format.

    app: one for all nodes, or one per node (a faulty one among them).
    """

    def __init__(
        self,
        app: ClientApp | Sequence[ClientApp],
        nodes: Sequence[Mapping[str, Any]],
        *,
        run_config: Mapping[str, Any] | None = None,
        workers: int = 1,
    ) -> None:
        apps = [app] * len(nodes) if isinstance(app, ClientApp) else list(app)
        self.nodes = dict(enumerate(zip(apps, nodes, strict=True), start=1))
        self.run_config = dict(run_config or {})
        self.pool = ThreadPoolExecutor(workers)
        self.replies: dict[str, Message] = {}
        self.lock = threading.Lock()
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, RUN, SUPERLINK_NODE_ID

    def set_run(self, run: Run) -> None:
        raise NotImplementedError("this grid has one run")

    @property
    def run(self) -> Run:
        return Run.create_empty(run_id=RUN)

    def create_message(self, *args: Any, **keywords: Any) -> Message:
        raise NotImplementedError("use Message(...)")

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            number = str(uuid4())
            message.metadata.__dict__["_message_id"] = number
            message.content = _carried(message.content)
            self.pool.submit(self._work, message)
            numbers.append(number)
        return numbers

    def _work(self, message: Message) -> None:
        app, config = self.nodes[message.metadata.dst_node_id]
        context = Context(RUN, message.metadata.dst_node_id, dict(config), RecordDict(), dict(self.run_config))
        try:
            reply = app(message, context)
            reply.content = _carried(reply.content)
        except Exception as error:  # as a SuperNode does: any error becomes a reply
            reason = f"{type(error)}:<'{error}'>"
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
        with self.lock:
            self.replies[message.metadata.message_id] = reply

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        with self.lock:
            return [self.replies.pop(number) for number in list(message_ids) if number in self.replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError("use oneflare.simulation.engines.flower.gather")

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)


def _carried(content: RecordDict) -> RecordDict:
    return recorddict_from_proto(recorddict_to_proto(content))
