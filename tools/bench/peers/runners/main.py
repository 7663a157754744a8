"""Process of one measured engine: a JSON line in, a JSON line out.

Run by path with the interpreter of the engine's environment: ``main.py MODULE OPTIONS``. The
module's ``load(options)`` returns the functions that lines such as ``{"do": "decode", "with":
{"batch": 1}}`` call. An answer is ``{"value": ..., "rss": bytes}`` or ``{"error": text}``; the
first one tells that loading ended, with the seconds it took. The engine's own prints go to
stderr. With ``cores`` in the options the process stays on these.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Load the module named on the command line and serve until stdin ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    options = json.loads(sys.argv[2])
    os.sched_setaffinity(0, options["cores"])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    started = time.perf_counter()
    functions = importlib.import_module(sys.argv[1]).load(options)
    _answer(answers, {"value": time.perf_counter() - started, "rss": _rss()})
    for line in sys.stdin:
        question = json.loads(line)
        try:
            value = functions[question["do"]](**question["with"])
        except (RuntimeError, ValueError, KeyError, TypeError, OSError, MemoryError) as error:
            _answer(answers, {"error": f"{type(error).__name__}: {error}"})
        else:
            _answer(answers, {"value": value, "rss": _rss()})


def _answer(answers: object, answer: dict[str, object]) -> None:
    print(json.dumps(answer), file=answers, flush=True)  # type: ignore[call-overload]


def _rss() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
