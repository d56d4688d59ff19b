"""Which live changes a running replay refuses because of the model or of its own limits."""

import pytest

from asyncrl.config import validate
from asyncrl.errors import ConfigError
from asyncrl.models.describe import describe
from asyncrl.replay.limits import fits
from asyncrl.tunable import merged
from tests.helpers.tiny_models import qwen3_dense, qwen3_moe, save


@pytest.mark.parametrize(("make", "refused"), [(qwen3_moe, False), (qwen3_dense, True)])
def test_a_correction_that_compares_routers_is_not_tuned_onto_a_dense_model(tmp_path, make, refused):
    save(make(), tmp_path / "model")
    off = {"mode": "observe"} if make is qwen3_moe else {"mode": "off"}
    config = validate(
        {
            "model": {"path": str(tmp_path / "model")},
            "algorithm": {"rdc": off},
            "staleness": {"updates_per_take": 2},
        }
    )
    check = fits(describe(str(tmp_path / "model")), [], 2**30)
    check(config)
    rspo = merged(config, {"algorithm.correction.kind": "rspo"})
    if not refused:
        check(rspo)
        return
    with pytest.raises(ConfigError, match=r"algorithm\.correction\.kind=rspo compares routers .* is dense; choose"):
        check(rspo)
