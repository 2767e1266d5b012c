"""Which tokens of a corpus are learned: columns and second files that say so, by name or by content."""

import datasets
import numpy as np
import pytest
from corpora import DOCUMENTS, MASKS, content, save_dataset, write_datatrove, write_megatron, write_prepared

from wlb_titan.corpus import Corpus, CorpusError

pytestmark = pytest.mark.slow

LABELS = [np.where(mask, tokens, -100).tolist() for tokens, mask in zip(DOCUMENTS, MASKS, strict=True)]


def learned(corpus):
    """The mask of each document, read whole and in two pieces, and counted."""
    result = []
    for row, length in enumerate(np.asarray(corpus.lengths).tolist()):
        whole, half = corpus.learned(row, 0, length), length // 2
        pieces = [corpus.learned(row, 0, half), corpus.learned(row, half, length - half)]
        assert np.concatenate(pieces).tolist() == whole.tolist()
        starts, stops = np.array([0, half, min(1, length)]), np.array([half, length, length])
        counted = corpus.count_learned(np.full(3, row), starts, stops)
        assert counted.tolist() == [*(piece.sum() for piece in pieces), whole[1:].sum()]
        result.append(whole.astype(int).tolist())
    return result


@pytest.mark.parametrize("column", ["labels", "loss_mask", "assistant_masks", "completion_mask", "prepared"])
def test_a_column_says_what_is_learned(tmp_path, column):
    if column == "prepared":
        path = write_prepared(tmp_path / "p", DOCUMENTS, MASKS)
        assert Corpus.open(path).preparation.learned_tokens == sum(map(sum, MASKS))
    else:
        path = save_dataset(tmp_path / "chat", **{column: LABELS if column == "labels" else MASKS})
    assert learned(Corpus.open(path)) == MASKS
    unmasked = Corpus.open(path, mask="none")
    assert learned(unmasked) == [[1] * len(tokens) for tokens in DOCUMENTS] and not unmasked.masked


def test_masks_are_read_whole_when_labels_are_first_counted_and_once(tmp_path, monkeypatch):
    corpus = Corpus.open(save_dataset(tmp_path / "chat", loss_mask=MASKS))
    corpus.check_learned(corpus.lengths)
    (shard,), read = corpus.shards, []
    gathered = shard.mask._values.gathered
    monkeypatch.setattr(shard.mask._values, "gathered", lambda *of: read.append(len(of[0])) or gathered(*of))
    rows, lengths = np.arange(len(corpus)), np.asarray(corpus.lengths)
    for _ in range(3):
        counts = corpus.count_learned(rows, np.minimum(1, lengths), lengths)
        assert counts.tolist() == [sum(mask[1:]) for mask in MASKS] and sum(read) == len(corpus)


def test_two_columns_that_say_what_is_learned_are_refused_by_name(tmp_path):
    path = save_dataset(tmp_path / "chat", labels=LABELS, loss_mask=MASKS)
    with pytest.raises(CorpusError, match=r"several columns .*: labels, loss_mask") as refused:
        Corpus.open(path)
    assert refused.value.setting == "corpus.mask"
    assert learned(Corpus.open(path, mask="loss_mask")) == MASKS
    with pytest.raises(CorpusError, match="no column 'mask'; it has input_ids, labels, loss_mask"):
        Corpus.open(path, mask="mask")


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"labels": [tokens[1:] + [-100] * bool(tokens) for tokens in DOCUMENTS]}, "shifted by one"),
        ({"loss_mask": [[2] * len(tokens) for tokens in DOCUMENTS]}, "the value 2 in the mask 'loss_mask'"),
        ({"loss_mask": [[1], *MASKS[1:]]}, r"has 1 values for .*\[0\], which has 3 tokens"),
    ],
    ids=["shifted", "no mask", "wrong length"],
)
def test_masks_that_are_none_are_refused(tmp_path, columns, said):
    with pytest.raises(CorpusError, match=said):
        Corpus.open(save_dataset(tmp_path / "chat", **columns)).check_sample(1000)


def of_rows(value):
    return [[value(at) for at in range(len(tokens))] for tokens in DOCUMENTS]


COLUMNS = {  # beside the tokens, and what is said about them
    "harmless": (
        {
            "attention_mask": of_rows(lambda place: 1),
            "token_type_ids": of_rows(lambda place: 0),
            "position_ids": of_rows(lambda place: place),
            "seq_lengths": [[len(tokens)] for tokens in DOCUMENTS],
            "text": ["a"] * 7,
            "length": [1] * 7,
            "words": [["a", "b"]] * 7,
            "messages": [[{"role": "user", "content": "a"}]] * 7,
        },
        "",
    ),
    "padding": ({"attention_mask": of_rows(lambda at: int(at < 9))}, "'attention_mask' that shows rows"),
    "two texts": ({"token_type_ids": of_rows(lambda at: int(at > 9))}, "'token_type_ids' that shows rows"),
    "restarts": ({"position_ids": of_rows(lambda at: at % 9)}, "'position_ids' that shows rows"),
    "packed": ({"seq_lengths": [[1, len(row) - 1] for row in DOCUMENTS]}, "'seq_lengths' that shows rows"),
    "weights": ({"loss_weights": of_rows(lambda at: 0.5)}, r"'loss_weights'.*_columns\('loss_weights'\)"),
    "a weight": ({"weight": [0.5] * 7}, "'weight', which is not read"),
    "segments": ({"segment_ids": of_rows(lambda at: at % 2)}, "'segment_ids', which is not read"),
    "a null": ({"labels": [[None, *labels[1:]] if labels else [] for labels in LABELS]}, "Row 0 of .* null"),
    "a null row": ({"loss_mask": [*MASKS[:3], None, *MASKS[4:]]}, "Row 3 .* null in the column 'loss_mask'"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_are_followed_known_to_be_harmless_or_refused(tmp_path, name):
    columns, message = COLUMNS[name]
    path = save_dataset(tmp_path / "d", **columns)
    if message:
        with pytest.raises(CorpusError, match=message):
            Corpus.open(path).check_sample(1000)
        left = datasets.load_from_disk(path).remove_columns(list(columns))
        left.save_to_disk(tmp_path / "left")  # what the message asks for
        path = tmp_path / "left"
    Corpus.open(path).check_sample(1000)
    assert content(Corpus.open(path)) == DOCUMENTS


def test_no_mask_overrules_columns_that_say_what_is_learned_and_not_padding(tmp_path):
    path = save_dataset(tmp_path / "d", segment_ids=DOCUMENTS, loss_mask=MASKS, labels=LABELS)
    Corpus.open(path, mask="none").check_sample(1000)
    with pytest.raises(CorpusError, match="'segment_ids'"):
        Corpus.open(path, mask="labels")
    path = save_dataset(tmp_path / "padded", attention_mask=MASKS)
    with pytest.raises(CorpusError, match="'attention_mask'"):
        Corpus.open(path, mask="none").check_sample(1000)


@pytest.mark.parametrize(("kind", "length"), [("bool", -1), ("float32", -1), ("int64", 2)])
def test_columns_of_other_kinds_name_the_cast_that_helps(tmp_path, kind, length):
    def lists(kind):
        return datasets.List(datasets.Value(kind), length=length)

    features = datasets.Features({"input_ids": lists("int32"), "loss_mask": lists(kind)})
    values = {"input_ids": [[5, 6], [7, 8]], "loss_mask": [[0, 1], [1, 1]]}
    datasets.Dataset.from_dict(values, features=features).save_to_disk(tmp_path / "d")
    cast = r"cast_column\('\w+', datasets.List\(datasets.Value\('int32'\)\)\)"
    with pytest.raises(CorpusError, match=cast):
        Corpus.open(tmp_path / "d")
    cast = datasets.load_from_disk(tmp_path / "d")
    for column in values:
        cast = cast.cast_column(column, datasets.List(datasets.Value("int32")))
    cast.save_to_disk(tmp_path / "cast")
    assert learned(Corpus.open(tmp_path / "cast")) == values["loss_mask"]


@pytest.mark.parametrize("form", ["d", "p"])
def test_a_mask_by_which_nothing_is_learned_is_refused(tmp_path, form):
    """A document's first token is never learned."""
    masks = [[1] * bool(tokens) + [0] * (len(tokens) - 1) for tokens in DOCUMENTS]
    if form == "p":
        path = write_prepared(tmp_path / "p", DOCUMENTS, masks)
    else:
        path = save_dataset(tmp_path / "d", loss_mask=masks)
    corpus = Corpus.open(path)
    with pytest.raises(CorpusError, match="leaves no token of these documents to be learned"):
        corpus.check_learned(corpus.lengths)
    Corpus.open(path, mask="none").check_learned(corpus.lengths)


def test_a_folder_of_two_tools_hidden_files_and_missing_masks(forms, tmp_path):
    for number in range(2):
        write_datatrove(tmp_path / f"{number}.ds", DOCUMENTS)
    (tmp_path / "._0.ds").write_bytes(b"of macOS")
    (tmp_path / "._m.idx").write_bytes(b"of macOS")
    assert content(Corpus.open(tmp_path)) == [*DOCUMENTS, *DOCUMENTS]
    (tmp_path / "0.ds.loss").write_bytes(bytes(value for mask in MASKS for value in mask))
    with pytest.raises(CorpusError, match=r"1\.ds has no mask 1\.ds\.loss"):
        Corpus.open(tmp_path)
    write_megatron(tmp_path / "m", DOCUMENTS)
    (tmp_path / "two").mkdir()
    for name in ("tokens", "mask"):
        write_megatron(tmp_path / "two" / name, DOCUMENTS)
    with pytest.raises(CorpusError, match=r"two/mask\.idx is in the folder of the documents"):
        Corpus.open(tmp_path / "two")
    with pytest.raises(CorpusError, match=r"of datatrove \(0\.ds\) and of Megatron \(m\.idx\)"):
        Corpus.open(tmp_path)


def test_megatron_s_and_datatrove_s_masks_are_second_files(forms, tmp_path):
    mask = write_megatron(tmp_path / "mask", MASKS, dtype=np.uint8)
    assert learned(Corpus.open(forms / "m", mask=str(mask))) == MASKS
    assert not Corpus.open(forms / "m").masked
    with pytest.raises(CorpusError, match="0 pairs"):
        Corpus.open(forms / "m", mask="nowhere")
    assert learned(Corpus.open(write_datatrove(tmp_path / "a.ds", DOCUMENTS, masks=MASKS))) == MASKS
