"""A double of EC2's instance metadata service, with the paths that a client asks for."""

import http.server


class Metadata(http.server.ThreadingHTTPServer):
    """IMDSv2's three answers: a token for a PUT with a lifetime, 401 without a valid one, 404
    before an announcement.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.announced = None
        self.token = "first"
        self.seen = []
        self.status = None
        self.base = f"http://127.0.0.1:{self.server_port}"


class Answers(http.server.BaseHTTPRequestHandler):
    """Handles a request."""

    def log_message(self, *_):
        """Print nothing on standard error."""

    def _answer(self, code, body=b""):
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self):
        """Return a token."""
        self.server.seen.append("PUT")
        fits = self.headers["X-aws-ec2-metadata-token-ttl-seconds"] == "21600"
        right = self.path == "/latest/api/token" and fits
        self._answer(200 if right else 400, self.server.token.encode())

    def do_GET(self):
        """Return the announcement that the instance ends, or 404."""
        self.server.seen.append("GET")
        if self.server.status:
            self._answer(self.server.status)
        elif self.headers["X-aws-ec2-metadata-token"] != self.server.token:
            self._answer(401)
        elif self.path != "/latest/meta-data/spot/instance-action" or not self.server.announced:
            self._answer(404)
        else:
            self._answer(200, self.server.announced)
