"""A server of OpenAI's API that answers at once, run as ``python -m`` in the place of a peer."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "model"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count = asked["max_tokens"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for _ in range(count):
            self._event({"choices": [{"text": "x"}]})
        self._event({"choices": [{"text": "", "finish_reason": "length"}]})
        usage = {"prompt_tokens": len(asked["prompt"].split()), "completion_tokens": count}
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _event(self, body: object) -> None:
        data = b"data: " + json.dumps(body).encode() + b"\n\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))


if __name__ == "__main__":
    if sys.argv[1] == "broken":
        sys.exit("no such model")
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), _Handler).serve_forever()
