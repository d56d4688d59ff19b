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

_WHY_NOT: dict[str, str] = {
    "boxnet graph_color propositional_logic rubiks_cube rush_hour": "no gold answer to compare with",
    "cryptarithm countdown jugs kakurasu knight_swap letter_jumble n_queens palindrome_generation puzzle24 "
    "quantum_lock sentence_reordering shortest_path sokoban survo tower_of_hanoi": (
        "several right answers; only the library's scorer knows them, and it pays for parts"
    ),
    "intermediate_integration simple_integration complex_arithmetic codeio group_anagrams palindrome_partitioning "
    "advanced_geometry": "answers of one meaning in many forms, for which there is no rule here",
    "coin_flip number_format power_function": (
        "rounding: the answer has more or other digits than the question asks for"
    ),
    "isomorphic_strings polynomial_multiplication ransom_note word_ladder": (
        "items differ from process to process with the same seed"
    ),
    "pool_matrix": "refuses seeds above 2^32, so its sets cannot be kept apart",
    "list_functions": "up to a second per item",
    "composite": "several sources with weights do the same, each by its own rule",
}

NOT_ENABLED: dict[str, str] = {name: why for names, why in _WHY_NOT.items() for name in names.split()}
"""Datasets of reasoning-gym that no source may name -> why."""

_WHOLE = re.compile(r"-?\d+")


def rule_of(name: str, answer: str) -> str:
    """Verifier of one item. calendar_arithmetic asks for numbers, days and yes or no."""
    if name == "calendar_arithmetic" and _WHOLE.fullmatch(answer):
        return "rg_number"
    return RULES[name]
