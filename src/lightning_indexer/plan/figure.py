# SPDX-License-Identifier: Apache-2.0
"""A number, and what it rests on."""

from dataclasses import dataclass

EXACT = "exact"  # follows from the model's geometry and the load
MEASURED = "measured"  # in a result file of this project of this GPU type, or by `doctor --measure`
PUBLISHED = "published"  # by the maker or by another project
MODELLED = "modelled"  # rests on an assumption
STANDINGS = (EXACT, MEASURED, PUBLISHED, MODELLED)


@dataclass(frozen=True)
class Figure:
    """A value with its unit, the formula that gives it, and its standing: that of the weakest thing it rests on."""

    value: float
    unit: str
    formula: str
    standing: str

    def as_json(self) -> dict[str, float | str]:
        """For a result file."""
        return {"value": self.value, "unit": self.unit, "formula": self.formula, "standing": self.standing}


def weakest(*standings: str) -> str:
    """The standing of what rests on all of these."""
    return max(standings, key=STANDINGS.index)
