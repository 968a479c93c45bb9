"""Which parameter takes which rule: by logical shape, role and pattern."""
