"""What is found out before a model is loaded."""

import subprocess
import sys


def test_weights_are_counted_without_an_import_that_others_may_be_at() -> None:
    code = (
        "import sys, torch\n"
        "from penstock.launcher.layout import BUNDLED_MODEL\n"
        "from worker_svc.checkpoint import read_model_config\n"
        "from worker_svc.core.layers.placement import Placement\n"
        "from worker_svc.factory import _weights_bytes\n"
        "config = read_model_config(BUNDLED_MODEL)\n"
        "assert _weights_bytes(config, Placement(torch.device('cpu'), torch.float32)) > config.vocab_size\n"
        "assert not {'sympy', 'torch._dynamo', 'torch._inductor'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
