"""Tables: columns, classes, standardisation, weights and bad input."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from torsh_trainer.errors import ConfigError
from torsh_trainer.tasks.csv_file import CSV


def table(path: Path, rows: int = 40, *, columns: str = "a,b,kind,weight") -> str:
    generator = torch.Generator().manual_seed(rows)
    numbers = torch.rand(rows, 2, generator=generator).tolist()
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns.split(","))
        for row, (a, b) in enumerate(numbers):
            writer.writerow([a * 1000, b, "odd" if row % 4 else "even", row])
    return str(path)


def test_features_are_standardised_by_the_training_rows(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv")
    raw = CSV(path=path, target="kind", features=["a", "b"], standardise=False)
    source = CSV(path=path, target="kind", features=["a", "b"])
    train, test = raw.train.tensors[0], raw.test.tensors[0]
    mean, deviation = train.mean(0), train.std(0, correction=0)
    torch.testing.assert_close(source.train.tensors[0], (train - mean) / deviation)
    torch.testing.assert_close(source.test.tensors[0], (test - mean) / deviation)


def test_a_column_that_never_changes_becomes_0(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b,y\n" + "".join(f"7,{i},{i % 2}\n" for i in range(20)))
    features = CSV(path=str(tmp_path / "t.csv"), target="y").train.tensors[0]
    assert not features[:, 0].any()
    assert features.isfinite().all()


def test_classes_are_numbered_in_sorted_order_and_split_alike(tmp_path: Path) -> None:
    source = CSV(path=table(tmp_path / "t.csv"), target="kind", features=["a"])
    assert source.classes == ["even", "odd"]
    assert (source.num_classes, source.in_features, source.num_targets) == (2, 1, None)
    for data in (source.train, source.eval, source.test):
        assert torch.bincount(data.tensors[1]).tolist() == [len(data) // 4, len(data) * 3 // 4]


def test_features_default_to_all_columns_but_the_target_and_the_weight(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv")
    assert CSV(path=path, target="kind", weight="weight").in_features == 2
    assert CSV(path=path, target="kind").in_features == 3


def test_a_column_of_weights_follows_the_training_rows(tmp_path: Path) -> None:
    source = CSV(path=table(tmp_path / "t.csv"), target="kind", weight="weight", standardise=False)
    rows = CSV(
        path=source.path, target="kind", features=["weight"], standardise=False
    ).train.tensors[0]
    weights = source.sample_weights()
    assert weights is not None
    assert torch.equal(weights, rows.squeeze(1).double())


def test_without_a_column_of_weights_classes_are_drawn_alike(tmp_path: Path) -> None:
    source = CSV(path=table(tmp_path / "t.csv"), target="kind", features=["a"])
    weights, labels = source.sample_weights(), source.train.tensors[1]
    assert weights is not None
    assert weights[labels == 0].sum().item() == pytest.approx(weights[labels == 1].sum().item())


def test_numbers_are_predicted_as_they_are(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv")
    source = CSV(path=path, target=["a", "weight"], features=["b"], kind="regression")
    assert source.train.tensors[1].shape == (32, 2)
    assert source.num_targets == 2
    assert source.sample_weights() is None
    with Path(path).open() as file:
        written = {round(float(row["a"]), 3) for row in csv.DictReader(file)}
    parts = (source.train, source.eval, source.test)
    read = torch.cat([part.tensors[1][:, 0] for part in parts]).tolist()
    assert sorted(read) == pytest.approx(sorted(written), abs=1e-2)


def test_tables_of_their_own_for_evaluation_test_and_prediction(tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("b,a\n1,10\n2,20\n")
    source = CSV(
        path=table(tmp_path / "train.csv", 40),
        eval_path=table(tmp_path / "eval.csv", 12),
        test_path=table(tmp_path / "test.csv", 8),
        predict_path=str(tmp_path / "new.csv"),
        target="kind",
        features=["a", "b"],
        standardise=False,
    )
    parts = (source.train, source.eval, source.test, source.predict)
    assert [len(part) for part in parts] == [40, 12, 8, 2]
    (features,) = source.predict.__getitems__([1, 0])
    assert features.tolist() == [[20.0, 2.0], [10.0, 1.0]]  # by the names of the columns


def test_other_delimiters_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    lines = "\ufeffx; y\n" + "".join(f"{i};{i % 2}\n\n" for i in range(20))
    (tmp_path / "t.csv").write_text(lines, encoding="utf-8")
    assert CSV(path=str(tmp_path / "t.csv"), target="y", delimiter=";").in_features == 1


@pytest.mark.parametrize(
    ("content", "knobs", "words"),
    [
        (None, {}, r"there is no file t\.csv"),
        ("", {}, r"t\.csv has no rows"),
        ("a,y\n", {}, r"t\.csv has no rows"),
        ("a,a,y\n1,2,3\n", {}, "two columns 'a'"),
        ("a,y\n1,2\n3\n", {}, "row 2 has 1 cells, the header 2"),
        ("a,y\n1,2\nx,3\n", {}, "row 2, column 'a' is 'x', not a number"),
        ("a,y\n1,2\n,3\n", {}, "row 2, column 'a' is '', not a number"),
        ("a,y\nnan,2\n1,3\n", {}, "row 1, column 'a' is 'nan', not a number"),
        ("a,y\n1,high\n", {"kind": "regression"}, "row 1, column 'y' is 'high'"),
        ("a,y\n1,2\n", {"target": "Y"}, r"no column 'Y'; choose one of a, y"),
        ("a,y\n1,2\n", {"features": ["b"]}, "no column 'b'"),
        ("a,y\n1,2\n", {"weight": "w"}, "no column 'w'"),
        ("y\n1\n2\n", {}, "no feature columns"),
        ("a,y\n1,2\n1,3\n", {}, "2 samples are too few to split"),
        ("a,y\n1,2\n", {"kind": "ranking"}, "choose classification or regression"),
        ("a,y\n1,2\n", {"target": ["a", "y"]}, "one target column, not 2"),
        ("a,y\n1,2\n", {"delimiter": ""}, "data.delimiter='' is not one character"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_with_row_and_column(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: str | None,
    knobs: dict[str, Any],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "t.csv").write_text(content)
    with pytest.raises(ConfigError, match=words):
        _ = CSV(**{"path": "t.csv", "target": "y", **knobs}).train


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"a,y\n\xff\xfe,1\n")
    with pytest.raises(ConfigError, match=r"cannot read .* give a CSV file in UTF-8"):
        _ = CSV(path=str(tmp_path / "t.csv"), target="y").train


def test_weights_below_0_are_refused(tmp_path: Path) -> None:
    rows = "".join(f"{i},{i % 2},{-1}\n" for i in range(20))
    (tmp_path / "t.csv").write_text(f"a,y,w\n{rows}")
    with pytest.raises(ConfigError, match="'w' holds no sampling weights"):
        CSV(path=str(tmp_path / "t.csv"), target="y", weight="w").sample_weights()


def test_a_class_that_training_never_saw_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test.csv").write_text("a,b,kind\n1,2,neither\n")
    source = CSV(
        path=table(tmp_path / "t.csv"),
        test_path=str(tmp_path / "test.csv"),
        target="kind",
        features=["a", "b"],
    )
    with pytest.raises(ConfigError, match="no training row has the class 'neither'"):
        _ = source.test
