import pytest

pytest.importorskip("triton", reason="Triton has wheels for Linux only")
