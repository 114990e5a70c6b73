"""C99 source of an exported policy: network, normaliser, history and card, without dependencies.

All values live in one array `v`. An operation that only moves numbers (a reshape, a gather) is resolved here, by
applying it to their indices in `v`; others become loops.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpusim_rl.deployed.walkers import reading
from gpusim_rl.errors import ConfigError
from gpusim_rl.export.policy import OPERATIONS, DeployedPolicy
from gpusim_rl.files import npz_file
from gpusim_rl.files.safe_open import load_json
from gpusim_rl.sim.robot_xml import bounded_memory

NPZ_BYTES = 16 << 20  # size of the network; 4 million weights take 50 MB of C
CHECKS = 5  # control steps of the test vector; more than one, for the history
BLOCK = 8  # outputs that a linear layer sums at once, so that compilers use vector instructions
MOVES = ("Gather", "Reshape", "Squeeze", "Unsqueeze", "Slice", "Concat")
FORMULAS = {
    **{name: f"{{0}} {sign} {{1}}" for name, sign in (("Add", "+"), ("Sub", "-"), ("Mul", "*"), ("Div", "/"))},
    "Clip": "larger(smaller({0}, {2}), {1})",
    "Max": "larger({0}, {1})",
    "Min": "smaller({0}, {1})",
    "Pow": "powf({0}, {1})",
    "Sqrt": "sqrtf({0})",
    "Tanh": "tanhf({0})",
    "Relu": "larger({0}, 0.0f)",
    "Sigmoid": "1.0f / (1.0f + expf(-{0}))",
    "Elu": "{0} > 0.0f ? {0} : {alpha} * expm1f({0})",
}
KEYWORDS = "auto break case char const continue default do double else enum extern float for goto if inline int long"
KEYWORDS += (
    " register restrict return short signed sizeof static struct switch typedef union unsigned void volatile while"
)

HEAD = """\
/* Policy exported by gpusim_rl.
 *
 *     policy_state state;
 *     policy_reset(&state);                          at the start of each episode
 *     policy_act(&state, &input, action, control);   in each control step, at %(hz)s Hz
 *
 * cc -std=c99 -O2 -DPOLICY_TEST policy.c -lm && ./a.out    checks this file; exit code 0: correct
 */
#include <math.h>
#include <string.h>

enum { POLICY_INPUTS = %(inputs)d, POLICY_ACTIONS = %(actions)d, POLICY_CONTROLS = %(controls)d };

/* Raw values of the observation's terms, in the card's units. */
typedef struct {
%(fields)s
} policy_input;

/* Network input (the history of all terms) and last action. */
typedef struct {
    float obs[POLICY_INPUTS], action[POLICY_ACTIONS];
    int started;
} policy_state;

static inline float smaller(float x, float y) { return x > y ? y : x; } /* of NaN: NaN */
static inline float larger(float x, float y) { return x < y ? y : x; }

/* Weights are in blocks of %(block)d outputs, input by input. */
static void linear(const float *restrict x, const float *restrict weight, const float *restrict bias, float *restrict y,
                   int inputs, int outputs) {
    for (int j = 0; j < outputs; j += %(block)d) {
        float sum[%(block)d];
        for (int k = 0; k < %(block)d; k++) sum[k] = bias[j + k];
        for (int i = 0; i < inputs; i++, weight += %(block)d)
            for (int k = 0; k < %(block)d; k++) sum[k] += x[i] * weight[k];
        for (int k = 0; k < %(block)d; k++) y[j + k] = sum[k];
    }
}
"""
NETWORK = """\

/* Network alone: from the scaled observation, with its history, to the action and the controls. */
void policy_network(const float *obs, float *outputs) {
    float v[%(length)d];
    memcpy(v, obs, sizeof(float) * POLICY_INPUTS);
%(body)s}
"""
TAIL = """\

void policy_reset(policy_state *state) { memset(state, 0, sizeof *state); }

/* Append a frame, without its encoder biases, to a term's history; the first frame of an episode fills it. */
static void append(policy_state *state, float *frames, const float *value, const float *bias, float scale, int size,
                   int history) {
    if (state->started) memmove(frames, frames + size, sizeof(float) * (size_t)(size * (history - 1)));
    for (int i = state->started ? history - 1 : 0; i < history; i++)
        for (int k = 0; k < size; k++) frames[i * size + k] = (value[k] - (bias ? bias[k] : 0.0f)) * scale;
}

/* Write the action and, for each actuator, its control. Return 0, or the number of the term that is not finite; then
 * nothing is written. */
int policy_act(policy_state *state, const policy_input *input, float *action, float *control) {
    float outputs[POLICY_ACTIONS + POLICY_CONTROLS];
    static const float control_bias[POLICY_CONTROLS + 1] = %(control_bias)s;
    (void)control;
    (void)control_bias;
%(terms)s
    state->started = 1;
    policy_network(state->obs, outputs);
    memcpy(state->action, outputs, sizeof state->action);
    memcpy(action, outputs, sizeof state->action);
    for (int i = 0; i < POLICY_CONTROLS; i++) control[i] = outputs[POLICY_ACTIONS + i] + control_bias[i];
    return 0;
}

const char *const policy_card[] = {
%(card)s
};

#ifdef POLICY_TEST
int main(void) {
    static const policy_input inputs[] = {
%(test_inputs)s
    };
    static const float expected[][POLICY_ACTIONS] = {
%(test_actions)s
    };
    policy_state state;
    float action[POLICY_ACTIONS], control[POLICY_CONTROLS + 1];
    policy_reset(&state);
    for (int step = 0; step < %(checks)d; step++) {
        if (policy_act(&state, &inputs[step], action, control)) return 2;
        for (int i = 0; i < POLICY_ACTIONS; i++)
            if (!(fabsf(action[i] - expected[step][i]) <= %(tolerance)s * larger(1.0f, fabsf(action[i])))) return 1;
    }
    return 0;
}
#endif
"""
TOLERANCE = 1e-4  # of the test vector, relative for magnitudes above 1: rounding of other compilers and libraries


def c_source(folder: Path) -> str:
    """Return the C file of an export folder, which may be untrusted: only its numbers enter the code, as literals.

    Raises:
        ConfigError: The folder is no export, or its policy is recurrent, observes images or is not written as numpy.
    """
    with reading(folder), bounded_memory():
        card = load_json(folder / "policy.json")
        if card["recurrent_state"] or card["observation"].get("images") or "numpy" not in card["files"]:
            raise ConfigError("recurrent policies, images and networks without policy.npz cannot be written as C")
        arrays, _ = npz_file.load(folder / Path(card["files"]["numpy"]).name, NPZ_BYTES)
        size, actions = int(card["observation"]["size"]), int(card["action"]["size"])
        network = Network(json.loads(str(arrays.pop("graph"))), arrays, size)
        terms = card["observation"].get("terms") or [
            {"name": "obs", "size": size, "scale": 1.0, "history": 1, "source": "task"}
        ]
        if (number := sum(term["size"] * term["history"] for term in terms)) != size:
            raise ConfigError(f"the terms have {number} numbers, the observation {size}")
        if network.sizes[0] != actions:
            raise ConfigError(f"the network has {network.sizes[0]} actions, the card {actions}")
        given = [term for term in terms if term["source"] != "last action"]
        names = dict(zip((term["name"] for term in given), field_names(given), strict=True))
        policy, random = DeployedPolicy(folder, plain=True), np.random.default_rng(0)
        inputs = [{term["name"]: random.standard_normal(term["size"]) for term in given} for _ in range(CHECKS)]
        policy.terms = terms
        tests = [policy.act(values)[0] for values in inputs]
        texts = {
            "hz": format(float(card.get("control_hz", 0.0)), "g"),
            "inputs": size,
            "actions": actions,
            "controls": sum(network.sizes) - actions,
            "fields": "\n".join(f"    float {names[term['name']]}[{int(term['size'])}];" for term in given),
            "terms": "\n".join(_observe(terms, names, policy)),
            "control_bias": _braced(
                [*(policy.bias.get(target, 0.0) for target in policy.targets[: sum(network.sizes) - actions]), 0.0]
            ),
            "card": _strings(json.dumps(card)),
            "test_inputs": "\n".join(f"        {{{', '.join(map(_braced, frame.values()))}}}," for frame in inputs),
            "test_actions": "\n".join(f"        {_braced(action)}," for action in tests),
            "checks": CHECKS,
            "block": BLOCK,
            "tolerance": literal(TOLERANCE),
        }
    return HEAD % texts + network.source() + TAIL % texts


class Network:
    """Function `policy_network` from the network's graph; `sizes` of its outputs."""

    def __init__(self, graph: Mapping[str, Any], arrays: Mapping[str, np.ndarray], inputs: int) -> None:
        self._tables: list[str] = []
        self._body: list[str] = []
        self._length = inputs
        # By name: constants, and indices in `v` of computed values.
        self._constants, self._indices = dict(arrays), {"obs": np.arange(inputs)[None]}
        for name, sources, result, attributes in graph["nodes"]:
            if any(source in self._indices for source in sources):
                self._indices[result] = self._operation(name, sources, attributes)
            else:
                constants = [self._constants[source] for source in sources]
                self._constants[result] = OPERATIONS[name](*constants, **attributes)
        outputs = [self._indices[name].ravel() for name in graph["outputs"]]
        self.sizes = [output.size for output in outputs]
        chosen = self._entry(np.concatenate(outputs))
        self._body.append(f"for (int i = 0; i < {sum(self.sizes)}; i++) outputs[i] = {chosen};")

    def source(self) -> str:
        """Return tables and function."""
        body = "".join(f"    {line}\n" for line in self._body)
        return "".join(self._tables) + NETWORK % {"length": self._length, "body": body}

    def _operation(self, name: str, sources: list[str], attributes: dict[str, Any]) -> np.ndarray:
        """Add an operation's code; return the indices of its result."""
        if name == "Concat":
            return OPERATIONS[name](*map(self._computed, sources), **attributes)
        values = [self._indices[source] if source in self._indices else self._constants[source] for source in sources]
        if name in MOVES:
            return np.asarray(OPERATIONS[name](*values, **attributes))
        if name in ("Gemm", "MatMul"):
            if sources[1] in self._indices:
                raise ConfigError("products of two computed values cannot be written as C")
            weight = values[1].T if attributes.get("transB") else values[1]
            return self._linear(self._computed(sources[0]), weight, values[2] if len(values) > 2 else np.zeros(1))
        if name in ("ReduceMean", "ArgMax"):
            return self._reduction(name, *values, **attributes)
        shape = np.broadcast_shapes(*(value.shape for value in values))
        operands = [
            (self._entry if source in self._indices else self._constant)(np.broadcast_to(value, shape).ravel())
            for value, source in zip(values, sources, strict=True)
        ]
        return self._loop(FORMULAS[name].format(*operands, alpha=literal(attributes.get("alpha", 1.0))), shape)

    def _linear(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
        inputs, outputs = weight.shape
        spare = -outputs % BLOCK
        blocks = np.pad(weight, ((0, 0), (0, spare))).reshape(inputs, -1, BLOCK).swapaxes(0, 1)
        factors = self._table(blocks, "float")
        offsets = self._table(np.pad(np.broadcast_to(bias.ravel(), outputs), (0, spare)), "float")
        rows = []
        for row in x.reshape(-1, inputs):
            first = row if _adjacent(row) else self._loop(self._entry(row), row.shape)
            result = self._allocate(outputs + spare)
            self._body.append(f"linear(v + {first[0]}, {factors}, {offsets}, v + {result[0]}, {inputs}, {outputs});")
            rows.append(result[:outputs])
        return np.stack(rows).reshape(*x.shape[:-1], outputs)

    def _reduction(self, name: str, x: np.ndarray, axes: Any = (), **attributes: Any) -> np.ndarray:
        axes = tuple(np.ravel(attributes.pop("axis", 0) if name == "ArgMax" else axes)) or tuple(range(x.ndim))
        shape = OPERATIONS["ReduceMean"](x, axes, **attributes).shape
        last = tuple(range(-len(axes), 0))
        members = np.moveaxis(x, axes, last).reshape(int(np.prod(shape)), -1)
        rows = [self._entry(row, "k") for row in members]
        result = self._allocate(len(rows))
        for at, row in zip(result, rows, strict=True):
            loop = f"for (int k = 0; k < {members.shape[1]}; k++)"
            if name == "ArgMax":
                best = self._entry(members[0], "best")
                self._body.append(f"{{ int best = 0; {loop} if ({row} > {best}) best = k; v[{at}] = (float)best; }}")
            else:
                self._body.append(f"v[{at}] = 0.0f; {loop} v[{at}] += {row}; v[{at}] /= {members.shape[1]}.0f;")
        return result.reshape(shape)

    def _loop(self, formula: str, shape: tuple[int, ...]) -> np.ndarray:
        """Add a loop over `i` that computes new values; return their indices."""
        result = self._allocate(int(np.prod(shape)))
        self._body.append(f"for (int i = 0; i < {result.size}; i++) v[{result[0]} + i] = {formula};")
        return result.reshape(shape)

    def _computed(self, name: str) -> np.ndarray:
        """Return a value's indices; copy constants first."""
        if name in self._indices:
            return self._indices[name]
        return self._loop(self._constant(self._constants[name].ravel()), self._constants[name].shape)

    def _entry(self, indices: np.ndarray, i: str = "i") -> str:
        """Return C for entry `i` of computed values."""
        return f"v[{indices[0]} + {i}]" if _adjacent(indices) else f"v[{self._table(indices, 'int')}[{i}]]"

    def _constant(self, values: np.ndarray) -> str:
        if (values == values[0]).all():
            return literal(values[0])
        return f"{self._table(values, 'float')}[i]"

    def _table(self, values: np.ndarray, kind: str) -> str:
        name = f"table_{len(self._tables)}"
        texts = [*map(literal if kind == "float" else str, values.ravel())]
        lines = "".join(f"    {', '.join(texts[i : i + 8])},\n" for i in range(0, len(texts), 8))
        self._tables.append(f"static const {kind} {name}[] = {{\n{lines}}};\n")
        return name

    def _allocate(self, number: int) -> np.ndarray:
        self._length += number
        return np.arange(self._length - number, self._length)


def _adjacent(indices: np.ndarray) -> bool:
    return bool((np.diff(indices) == 1).all())


def literal(value: Any) -> str:
    """Return a number as a float literal, exact in float32."""
    number = np.float32(value)
    if not np.isfinite(number):
        return "NAN" if np.isnan(number) else f"{'-' if number < 0 else ''}INFINITY"
    text = f"{number:.9g}"
    return f"{text}f" if {*text} & {*".e"} else f"{text}.0f"


def field_names(terms: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return each term's name in C: its own if it is one, else its number."""
    names = [str(term["name"]) for term in terms]
    usable = [re.fullmatch(r"[A-Za-z]\w{0,50}", name, re.ASCII) and name not in KEYWORDS.split() for name in names]
    return [name if ok else f"term_{i}_" for i, (name, ok) in enumerate(zip(names, usable, strict=True))]


def _observe(terms: Sequence[Mapping[str, Any]], names: Mapping[str, str], policy: DeployedPolicy) -> Iterator[str]:
    """Yield the statements that check the terms and append them to the history."""
    for i, term in enumerate(terms):
        if term["name"] in names:
            field = f"input->{names[term['name']]}[i]"
            yield f"    for (int i = 0; i < {int(term['size'])}; i++) if (!isfinite({field})) return {i + 1};"
    start = 0
    for term in terms:
        size, history = int(term["size"]), int(term["history"])
        value = f"input->{names[term['name']]}" if term["name"] in names else "state->action"
        offset, bias = np.broadcast_to(policy.offset(term["source"]), size), "NULL"
        if offset.any():
            bias = f"bias_{start}"
            yield f"    static const float {bias}[] = {_braced(offset)};"
        yield f"    append(state, state->obs + {start}, {value}, {bias}, {literal(term['scale'])}, {size}, {history});"
        start += size * history


def _braced(values: Sequence[float] | np.ndarray) -> str:
    return "{" + ", ".join(map(literal, np.ravel(values))) + "}"


def _strings(text: str) -> str:
    """Return an ASCII text as C string literals of a line each."""
    parts = (re.sub(r'[\\"?]', r"\\\g<0>", text[i : i + 100]) for i in range(0, len(text), 100))
    return "\n".join(f'    "{part}",' for part in parts)
