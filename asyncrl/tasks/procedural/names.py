"""Which datasets of reasoning-gym may be used, and the rule that compares their answers. Pure; imports nothing slow."""

from __future__ import annotations

import re

ZEBRA_GRID = "zebra_grid"

_BY_RULE: dict[str, str] = {
    "rg_number": (
        "aiw basic_arithmetic binary_alternation chain_sum circuit_logic count_bits count_primes decimal_arithmetic "
        "decimal_chain_sum gcd gsm_symbolic largest_island lcm leg_counting letter_counting maze number_sequence "
        "products rectangle_count rotten_oranges self_reference simple_equations simple_geometry"
    ),
    "rg_fraction": "dice fraction_simplification",
    "rg_word": (
        "acre base_conversion bitwise_arithmetic calendar_arithmetic color_cube_rotation course_schedule "
        "family_relationships game_of_life_halting mahjong_puzzle needle_haystack syllogism time_intervals tsumego "
        "zebra_puzzles"
    ),
    "rg_text": ("ab bf caesar_cipher emoji_mystery figlet_font spell_backward string_insertion string_manipulation"),
    "rg_list": "number_filtering number_sorting word_sequence_reversal word_sorting",
    "rg_factors": "prime_factorization",
    "rg_roots": "polynomial_equations",
    "rg_roles": "knights_knaves",
    "rg_grid": (
        "arc_1d arc_agi binary_matrix futoshiki game_of_life manipulate_matrix mini_sudoku modulo_grid path_star rearc "
        "rotate_matrix spiral_matrix string_splitting string_synthesis sudoku"
    ),
}

RULES: dict[str, str] = {name: rule for rule, names in _BY_RULE.items() for name in names.split()}
"""Dataset -> name of its verifier."""

NAMES: tuple[str, ...] = tuple(sorted({*RULES, ZEBRA_GRID}))
"""All procedures that a source may name."""

_WHOLE = re.compile(r"-?\d+")


def rule_of(name: str, answer: str) -> str:
    """Verifier of one item. calendar_arithmetic asks for numbers, days and yes or no."""
    if name == "calendar_arithmetic" and _WHOLE.fullmatch(answer):
        return "rg_number"
    return RULES[name]
