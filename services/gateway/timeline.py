"""Where a request's time went: phases that add up to its time to first token."""

from msgspec import Struct

from shared.messages.gateway_router import RequestTimeline
from shared.messages.request import PhaseTimes


class SecondToken(Struct, frozen=True):
    """The hand-over in seconds: first token sampled -> KV verified at decode -> own token."""

    transfer: float
    first_step: float


class Phases(Struct, frozen=True, kw_only=True):
    """Seconds. queue + prefill + transfer + first_step = ttft.

    ``queue``: arrival at the gateway to the start of prefill, hops included. ``prefill``: to
    the first token sampled. ``transfer``: to that token received here. ``first_step`` is 0:
    token 1 comes from prefill and waits for no decode step.
    """

    queue: float
    prefill: float
    transfer: float
    first_step: float = 0.0


class Timeline(Struct, frozen=True, kw_only=True):
    """The answer to ``"timeline": true``. ``moments`` are ``CLOCK_MONOTONIC`` seconds.

    ``phases`` is None where they cannot be told: the request was resumed after its first
    token, or ran on hosts whose clocks differ.
    """

    ttft: float | None
    arrival: float
    first_token: float | None
    last_token: float | None
    phases: Phases | None
    second_token: SecondToken | None
    split: bool
    reason: str
    retries: int
    prefill_worker: str | None
    decode_worker: str | None
    moments: RequestTimeline | None


class Moments(Struct, kw_only=True):
    """What the gateway itself sees of a request, in ``CLOCK_MONOTONIC`` seconds."""

    arrival: float
    first_token: float | None = None
    last_token: float | None = None


def make_timeline(seen: Moments, moments: RequestTimeline | None) -> Timeline:
    """Join the gateway's moments with those of router and workers."""
    known = moments or RequestTimeline(received=seen.arrival)
    first = seen.first_token
    return Timeline(
        ttft=None if first is None else first - seen.arrival,
        arrival=seen.arrival,
        first_token=first,
        last_token=seen.last_token,
        phases=_phases(seen, known),
        second_token=_second_token(known),
        split=known.split,
        reason=known.reason,
        retries=known.retries,
        prefill_worker=known.prefill_worker,
        decode_worker=known.decode_worker,
        moments=moments,
    )


def _phases(seen: Moments, known: RequestTimeline) -> Phases | None:
    for times in (known.prefill, known.decode):
        if times is None or times.started is None or times.prefilled is None:
            continue
        if seen.first_token is None:
            return None
        if not seen.arrival <= times.started <= times.prefilled <= seen.first_token:
            return None
        return Phases(
            queue=times.started - seen.arrival,
            prefill=times.prefilled - times.started,
            transfer=seen.first_token - times.prefilled,
        )
    return None


def _second_token(known: RequestTimeline) -> SecondToken | None:
    prefill, decode = known.prefill or PhaseTimes(), known.decode or PhaseTimes()
    done, verified, stepped = prefill.prefilled, decode.transferred, decode.stepped
    if done is None or verified is None or stepped is None:
        return None
    return SecondToken(transfer=verified - done, first_step=stepped - verified)
