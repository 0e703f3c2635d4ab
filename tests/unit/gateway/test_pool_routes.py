import json
import re

import pytest

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.generation_defaults import OPENAI_DEFAULTS
from contract.domain.request import format_request_id, parse_request_id, pool_of_request_id
from gateway_svc.core.models import Catalogue, ListedModel
from gateway_svc.core.pool_entries import PoolEntry, parse_pools
from gateway_svc.core.routes import Offer, Routes

DIGITS = "0123456789abcdef0123456789abcdef"


def offer(pool: str, *models: str, is_named: bool = False) -> Offer:
    return Offer(pool, Catalogue(tuple(ListedModel(name, 100, 5) for name in models), OPENAI_DEFAULTS), is_named)


def test_a_file_has_a_line_for_each_pool() -> None:
    lines = [
        b"# two pools",
        b'{"name": "main"}',
        b"",
        b'{"name": "code-1", "pool": "p", "redis_url": "redis://h/0", "models": ["coder", "c"], "num_shards": 8}',
    ]
    main, code = parse_pools(b"\n".join(lines))
    assert main == PoolEntry("main")
    assert (main.pool_name, code.pool_name) == ("main", "p")
    assert (code.redis_url, code.models, code.num_shards) == ("redis://h/0", ("coder", "c"), 8)
    assert main.is_same_pool(PoolEntry("main", models=("x",)))
    assert not main.is_same_pool(PoolEntry("main", redis_url="redis://h/0"))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "it has no pool"),
        (["# nothing"], "it has no pool"),
        (["nonsense"], "line 1 is not a pool (it is no JSON object)"),
        (['{"name": "a", "weight": 1}'], "unknown field `weight`"),
        (['{"name": "a b"}'], "$.name"),
        (['{"name": "a", "num_shards": 0}'], "$.num_shards"),
        (['{"name": "a", "models": "m"}'], "$.models"),
        (['{"redis_url": "redis://h"}'], "missing required field `name`"),
        (['{"name": "a"}', "", '{"name": "a", "pool": "b"}'], "line 3 has the name of line 1"),
        (['{"name": "a"}', '{"name": "b", "pool": "a"}'], "line 2 has the server and pool of line 1"),
        (['{"name": "a", "models": ["m"]}', '{"name": "b", "models": ["n", "m"]}'], "line 2 has the model of line 1"),
        (['{"name": "cmpl"}'], "no pool may be called cmpl"),
        (['{"name": "chatcmpl-x"}'], "no pool may be called chatcmpl-x"),
    ],
)
def test_a_file_that_is_wrong_says_where(lines: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_pools("\n".join(lines).encode())


def test_what_is_said_of_a_wrong_line_has_no_password() -> None:
    for wrong in ({"num_shards": 0}, {"redis_url": ["redis://:hunter2@h"]}, {"redis_password": "hunter2"}):
        with pytest.raises(ValueError, match="line 1") as caught:
            parse_pools(json.dumps({"name": "a", "redis_url": "redis://:hunter2@h"} | wrong).encode())
        assert "hunter2" not in str(caught.value)


def test_a_model_goes_to_the_pool_that_has_it() -> None:
    routes = Routes((offer("a", "one", "uno"), offer("b", "two")))
    assert [routes.find(name).pool for name in ("one", "uno", "two", "")] == ["a", "a", "b", "a"]
    assert [(model.name, of.pool) for model, of in routes.models] == [("one", "a"), ("uno", "a"), ("two", "b")]
    assert routes.contested == {}
    with pytest.raises(PenstockError) as caught:
        routes.find("three")
    assert caught.value.code is ErrorCode.MODEL_NOT_FOUND
    assert "'one', 'uno', 'two'" in caught.value.message


def test_a_model_of_several_pools_goes_to_the_one_that_the_operator_named_for_it_else_to_the_first() -> None:
    routes = Routes((offer("a", "one", "two"), offer("b", "two", "one"), offer("c", "two", is_named=True)))
    assert [routes.find(name).pool for name in ("one", "two")] == ["a", "c"]
    assert routes.contested == {"one": ("a", "b"), "two": ("c", "a", "b")}
    assert [(model.name, of.pool) for model, of in routes.models] == [("one", "a"), ("two", "c")], "each name once"


def test_a_model_may_be_in_a_pool_that_has_not_told_its_models() -> None:
    routes = Routes((offer("a", "one"), offer("b")))
    assert routes.find("one").pool == "a"
    with pytest.raises(PenstockError) as caught:
        routes.find("two")
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert "no worker of b has registered" in caught.value.message


def test_the_defaults_are_those_of_the_models_pool() -> None:
    silent = Offer("b", Catalogue((ListedModel("two", 100, 5),)))
    routes = Routes((offer("a", "one"), silent))
    assert routes.defaults("one") is OPENAI_DEFAULTS
    with pytest.raises(PenstockError, match="no tokenizer has said"):
        routes.defaults("two")


@pytest.mark.parametrize(
    ("text", "pool"),
    [
        (DIGITS, ""),
        (f"cmpl-{DIGITS}", ""),
        (f"chatcmpl-{DIGITS}", ""),
        (f"main-{DIGITS}", "main"),
        (f"cmpl-main-{DIGITS}", "main"),
        (f"chatcmpl-my-pool.1-{DIGITS}", "my-pool.1"),
        (f"cmplx-{DIGITS}", "cmplx"),
    ],
)
def test_an_id_names_its_pool(text: str, pool: str) -> None:
    assert pool_of_request_id(text) == pool
    assert parse_request_id(text) == bytes.fromhex(DIGITS)
    assert text.endswith(format_request_id(bytes.fromhex(DIGITS), pool))
