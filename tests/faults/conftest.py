import os
import signal

import pytest
from processes import Server


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("server") / "output.txt")
    yield server
    server.process.stdin.close()
    server.process.wait()


@pytest.fixture
def server(shared_server):
    shared_server.child = 0
    yield shared_server
    if shared_server.child:  # the test failed and left it running
        os.kill(shared_server.child, signal.SIGKILL)
        shared_server.end()
