from peers import children

__all__ = ["children"]
