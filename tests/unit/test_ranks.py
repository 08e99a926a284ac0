"""The order of nodes from round to round."""

import pytest

from zero_orchestrator.membership.rounds import arrange


@pytest.mark.parametrize(
    ("former", "candidates", "limit", "expected", "why"),
    [
        ("", "abc", 4, "abc", "the first round is in order of arrival"),
        ("abcd", "abd", 4, "abd", "survivors keep their order"),
        ("abcd", "bcd", 4, "bcd", "without rank 0 the next survivor takes its place"),
        ("abcd", "abde", 4, "abed", "a newcomer fills the hole"),
        ("abcd", "bcde", 4, "bcde", "a newcomer is never rank 0 beside survivors"),
        ("ab", "abcd", 4, "abcd", "further newcomers come last"),
        ("ab", "cab", 2, "ab", "survivors go before newcomers when places are short"),
        ("ab", "cd", 4, "cd", "newcomers alone start over"),
        ("abcd", "abcdef", 4, "abcd", "a full round keeps its nodes"),
        ("abc", "", 4, "", "nobody is left"),
    ],
)
def test_the_order_of_nodes(former, candidates, limit, expected, why):
    assert "".join(arrange(former, candidates, limit)) == expected, why
