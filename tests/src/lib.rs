//! Multi-process end-to-end and fault tests.
