"""An optimizer outside this package imports these names, which docs/extending.md explains; only they are stable.

======================================== ==============================================================================
name                                     what it promises
======================================== ==============================================================================
``Options``, ``option``, ``shared``      a field is a keyword, a JSON key, a flag, a documented and checked value
``checks``                               ranges of values: ``Number``, ``Fraction``, ``Integer``, ``Choice``...
``options_as_keywords``                  decorates the constructor: keywords, docstring and ``options_type``
``MatrixOptimizer``                      ``update`` gets one whole matrix with its states, on one rank
``MatrixSpec``, ``State``                the states of a matrix, declared once
``ElementOptimizer``, ``ElementSpec``    ``update`` gets runs of elements with their states, on every rank its own
``register``, ``unregister``             the name, in every framework and command
``ParameterInfo``, ``Route``             what a spec's ``adjust_route`` sees and returns
``OptionError``                          a refusal: shown to users as it is
======================================== ==============================================================================

Options that an optimizer declares have their effects by their names: ``state_dtype``, ``state_rounding``,
``comm_dtype``, ``exclude``, ``blocks``, ``split_heads``, ``lr_scale``, ``weight_decay_method``, ``skip_nonfinite``,
``transition_steps``, ``store_param_remainders``.
"""

from __future__ import annotations

from rankwise.names import register, unregister
from rankwise.options import checks, shared
from rankwise.options.constructor import options_as_keywords
from rankwise.options.fields import Options, option
from rankwise.options.validation import OptionError
from rankwise.routing.roles import ParameterInfo, Route
from rankwise.states.declared_states import State
from rankwise.step.element_wise import ElementOptimizer, ElementSpec
from rankwise.step.whole_matrices import MatrixOptimizer, MatrixSpec

__all__ = [
    "ElementOptimizer",
    "ElementSpec",
    "MatrixOptimizer",
    "MatrixSpec",
    "OptionError",
    "Options",
    "ParameterInfo",
    "Route",
    "State",
    "checks",
    "option",
    "options_as_keywords",
    "register",
    "shared",
    "unregister",
]
