"""Which parameter takes which rule and which rate: by logical shape, role and pattern."""
