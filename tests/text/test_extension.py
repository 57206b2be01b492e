"""An extended vocabulary is told from another one by its tokens alone."""

import pytest

from bert_pretrain.text.tokenizer import Tokenizer, find_extension, old_pieces

OLD = ["[PAD]", "[unused0]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##fold", "##s", "a", "##a", "b"]
IDS = {token: index for index, token in enumerate(OLD)}


def test_new_tokens_come_from_the_slots_and_the_end_with_their_old_pieces() -> None:
    new = [*OLD, "bs", "##as"]
    new[2] = "unfolds"
    extension = find_extension(OLD, new)
    assert extension is not None
    assert extension.pieces == {2: [7, 8, 9], 13: [12, 9], 14: [11, 9]}
    assert (extension.num_old_tokens, extension.num_tokens, extension.num_in_slots) == (13, 15, 1)
    same = find_extension(OLD, OLD)
    assert same is not None
    assert same.pieces == {}


@pytest.mark.parametrize(
    "new",
    [
        OLD[:-1],
        [*OLD[:-1], "c"],
        [OLD[1], OLD[0], *OLD[2:]],
        ["[PAD]", *OLD[2:], "c"],
        [token.replace("[UNK]", "<unk>") for token in OLD],
    ],
    ids=["shorter", "another word", "special token moved", "ids moved", "special token gone"],
)
def test_any_other_change_is_no_extension(new: list[str]) -> None:
    assert find_extension(OLD, new) is None


@pytest.mark.parametrize("word", ["unfolds", "aas", "as", "una", "bx", "x", "a" * 100, "a" * 101, "ba", "unfoldx"])
def test_pieces_are_those_of_wordpiece(word: str) -> None:
    tokenizer = Tokenizer(OLD, lowercase=True, strip_accents=None, handle_chinese_chars=True)
    assert old_pieces(word, IDS) == tokenizer.encode_text(word)


def test_a_token_that_cannot_be_cut_is_unknown() -> None:
    assert old_pieces("##x", IDS) == old_pieces("é", IDS) == [IDS["[UNK]"]]
    assert old_pieces("##as", IDS) == [IDS["##a"], IDS["##s"]]
