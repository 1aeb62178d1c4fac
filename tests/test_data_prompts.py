"""Prompts: the same everywhere, enough of them, and nothing held out that training could have seen."""

import hashlib
import json

import pytest

from megatron_dspark.data import prompts
from megatron_dspark.data.messages import check_record
from megatron_dspark.data.prompts import general_prompts, recipe_prompts
from megatron_dspark.errors import DSparkError


def texts(records: list[dict]) -> list[str]:
    return [record["messages"][0]["content"] for record in records]


@pytest.mark.parametrize(
    ("compose", "subjects", "train", "heldout"),
    [(recipe_prompts, prompts._DISHES, 2500, 250), (general_prompts, prompts._TOPICS, 1000, 200)],
)
def test_splits_share_no_subject_and_no_text(compose, subjects, train: int, heldout: int) -> None:
    seen, kept = texts(compose(train, "train")), texts(compose(heldout, "heldout"))
    assert len(set(seen)) == train and len(set(kept)) == heldout and not set(seen) & set(kept)
    held_out = [subject for index, subject in enumerate(subjects) if index % 5 == 4]
    trained = [subject for subject in subjects if subject not in held_out]
    # Whole words, so that "ants" is not found in "plants".
    assert not [text for text in seen for subject in held_out if f" {subject} " in f" {text.rstrip('.?')} "]
    assert {subject for subject in trained if any(subject in text for text in seen)} == set(trained)
    assert {subject for subject in held_out if any(subject in text for text in kept)} == set(held_out)


def test_no_dish_is_part_of_a_dish_of_the_other_split() -> None:
    dishes = list(enumerate(prompts._DISHES))
    assert len(set(prompts._DISHES)) >= 150 and len(prompts._RECIPE_WORDINGS) >= 6
    pairs = [(a, b) for i, a in dishes for j, b in dishes if (i % 5 == 4) != (j % 5 == 4) and a in b]
    assert pairs == []


def test_first_prompts_do_not_depend_on_the_count_and_are_fixed_for_good() -> None:
    many = recipe_prompts(400, "train", seed=3)
    assert recipe_prompts(150, "train", seed=3) == many[:150]
    assert texts(recipe_prompts(150, "train", seed=4)) != texts(many[:150])
    assert len({record["id"] for record in many}) == 400
    assert all(check_record(record, "here")["domain"] == "recipes" for record in many)
    # A published number belongs to these very prompts.
    digest = hashlib.sha256(json.dumps([recipe_prompts(2000, "train"), general_prompts(300, "heldout")]).encode())
    assert digest.hexdigest()[:16] == "296767f3e28f64d4"


def test_every_dish_comes_once_before_any_comes_twice() -> None:
    dishes = [dish for index, dish in enumerate(prompts._DISHES) if index % 5 != 4]
    first = texts(recipe_prompts(len(dishes), "train"))
    for dish in dishes:
        longer = [other for other in dishes if dish in other and other != dish]
        assert sum(dish in text and not any(other in text for other in longer) for text in first) == 1, dish


def test_too_many_or_an_unknown_split_is_refused() -> None:
    with pytest.raises(DSparkError, match=r"1000000 recipes prompts were asked for, and the heldout set has 1872"):
        recipe_prompts(10**6, "heldout")
    with pytest.raises(DSparkError, match='choose "train" or "heldout"'):
        general_prompts(1, "test")
