"""A gateway in miniature, true to the rules in ``diptych.wire``, for tests of the client."""

from dataclasses import dataclass, field

from diptych.wire import (
    Accepted,
    Bye,
    Cancel,
    ClientHello,
    Delta,
    DeltaItem,
    Ended,
    FromClient,
    Ping,
    Pong,
    StatusQuery,
    StatusReply,
    Submit,
    ToClient,
    Usage,
    Welcome,
)

HELD = 3
"""A token divisible by this keeps its text back until the next one that is not."""


def token_at(seed: int, index: int) -> int:
    return (seed * 31 + index * 7) % 100


def output(seed: int, count: int) -> list[int]:
    return [token_at(seed, i) for i in range(count)]


def text_of(tokens: list[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


def shown(tokens: list[int]) -> str:
    """What the detokeniser has let go after these tokens."""
    end = len(tokens)
    while end and tokens[end - 1] % HELD == 0:
        end -= 1
    return text_of(tokens[:end])


@dataclass
class Job:
    seed: int
    count: int
    tokens: list[int]
    prompt_tokens: int = 1


@dataclass
class ModelGateway:
    """One incarnation; ``mail`` holds what it has sent on the present session, in order."""

    incarnation: int
    session: int = 0
    jobs: dict[int, Job] = field(default_factory=dict)
    mail: list[ToClient] = field(default_factory=list)
    seeds: int = 0

    def take(self, session: int, message: FromClient) -> None:
        match message:
            case ClientHello():
                self.session, self.jobs = session, {}
                welcome = Welcome(
                    incarnation=self.incarnation, session=session, model="m", max_model_len=64
                )
                self.mail = [welcome]
            case Ping():
                known = session if session == self.session else 0
                self.mail.append(Pong(incarnation=self.incarnation, session=known))
            case _ if session != self.session:
                return
            case Submit():
                self._submit(message)
            case Cancel():
                if self.jobs.pop(message.id, None) is not None:
                    self.mail.append(Ended(id=message.id))
            case StatusQuery():
                self.mail.append(StatusReply(query=message.query, fleet=b"\x80"))
            case Bye():
                self.session, self.jobs = 0, {}

    def _submit(self, message: Submit) -> None:
        if message.params.seed is None:
            self.seeds += 1
        seed = self.seeds if message.params.seed is None else message.params.seed
        assert message.params.max_tokens is not None
        assert list(message.received) == output(seed, len(message.received)), "wrong resume"
        if message.received:
            assert message.token_ids == (9, 9), "a resume must carry the token ids"
        ids = None if message.token_ids is not None else (9, 9)
        self.jobs[message.id] = Job(seed, message.params.max_tokens, list(message.received))
        self.mail.append(Accepted(id=message.id, seed=seed, prompt_tokens=2, prompt_ids=ids))
        self._end(message.id)

    def step(self, count: int) -> None:
        """Generate up to ``count`` tokens of every job and send them in one delta."""
        items = []
        for id_, job in self.jobs.items():
            at, before = len(job.tokens), shown(job.tokens)
            job.tokens = output(job.seed, min(at + count, job.count))
            text = shown(job.tokens)[len(before) :]
            items.append(DeltaItem(id_, at, tuple(job.tokens[at:]), len(before), text))
        if items:
            self.mail.append(Delta(items=tuple(items)))
        for id_ in list(self.jobs):
            self._end(id_)

    def _end(self, id_: int) -> None:
        job = self.jobs[id_]
        if len(job.tokens) < job.count:
            return
        del self.jobs[id_]
        at = len(shown(job.tokens))
        end = Ended(
            id=id_,
            reason="length",
            num_tokens=job.count,
            text_at=at,
            text=text_of(job.tokens)[at:],
            usage=Usage(prompt_tokens=2, completion_tokens=job.count),
        )
        self.mail.append(end)
