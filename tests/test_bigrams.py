"""A Markov head that starts from the data's bigrams."""

import math

import pytest
import torch

from megatron_dspark.builder import padded_vocab_size
from megatron_dspark.data.chat import ChatSample
from megatron_dspark.errors import DSparkError
from megatron_dspark.model.draft import DSparkDraft
from megatron_dspark.training.bigrams import bigram_tables, start_from_bigrams
from megatron_dspark.training.settings import DraftSettings, TrainSettings
from tests.megatron import process_groups, tiny_config


def sample(ids: list[int], mask: list[int]) -> ChatSample:
    return ChatSample("one", torch.tensor(ids), torch.tensor(mask, dtype=torch.bool))


def data() -> list[ChatSample]:
    # Supervised pairs: 7→3 twice, 3→7, 3→5; the pair 5→9 has no loss on its second token.
    return [sample([7, 3, 7, 3], [0, 1, 1, 1]), sample([3, 5, 9], [0, 1, 0])]


def test_tables_reproduce_the_information_of_every_pair() -> None:
    tokens, first, second = bigram_tables(data(), rank=64)
    assert tokens.tolist() == [3, 5, 7]
    expected = torch.zeros(3, 3, dtype=torch.float64)
    expected[2, 0] = math.log((2 / 4) / (2 / 4 * 2 / 4))  # P(7, 3) / (P(7 first) P(3 second))
    expected[0, 2] = math.log((1 / 4) / (2 / 4 * 1 / 4))
    expected[0, 1] = math.log((1 / 4) / (2 / 4 * 1 / 4))
    torch.testing.assert_close(first @ second.T, expected, rtol=1e-9, atol=1e-9)


def test_a_lower_rank_keeps_the_strongest_part_and_the_random_stream_is_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    tokens, first, second = bigram_tables(data(), rank=1)
    assert torch.equal(before, torch.random.get_rng_state())
    assert first.shape == second.shape == (3, 1)
    again = bigram_tables(data(), rank=1)
    assert all(torch.equal(one, two) for one, two in zip((tokens, first, second), again, strict=True))


def started_tables(rank: int, world_size: int) -> list[torch.Tensor]:
    """This rank's rows of W1 and W2, zero before the start."""
    config = tiny_config(tensor_parallel_size=world_size)
    config.finalize()
    draft = DSparkDraft(config, padded_vocab_size(config), process_groups(world_size))
    head = draft.markov_head
    for table in (head.markov_w1, head.markov_w2):
        torch.nn.init.zeros_(table.weight)
    start_from_bigrams(draft, data(), config.markov_rank)
    return [head.markov_w1.weight.detach().clone(), head.markov_w2.weight.detach().clone()]


def test_every_rank_gets_its_own_rows(two_ranks) -> None:
    parts, whole = two_ranks.run(started_tables), started_tables(0, 1)
    tokens, first, second = bigram_tables(data(), rank=8)
    for table, joined, rows in zip(whole, map(torch.cat, zip(*parts, strict=True)), (first, second), strict=True):
        assert torch.equal(joined, table)
        assert torch.equal(table[tokens, : rows.shape[1]], rows)
        assert table.abs().sum() == rows.abs().sum()


def test_another_head_is_refused() -> None:
    settings = TrainSettings(target="a", data="b", output="c")
    settings.draft = DraftSettings(markov_start="bigrams", markov_head_type="rnn")
    with pytest.raises(DSparkError, match=r"'bigrams' is for the vanilla head and draft.markov_head_type is 'rnn'"):
        settings.validate()
    settings.draft = DraftSettings(markov_start="trigrams")
    with pytest.raises(DSparkError, match="'trigrams'"):
        settings.validate()
