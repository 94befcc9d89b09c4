"""Do all ranks do the same, with the same values?

compare       what each rank is about to do is compared before it communicates: RankMismatchError
with both sides eager_calls   where the eager calls of one of our functions stand in the user's
program values        JAXMPI_CHECK=1: arrays that must be equal are compared at every call
equal_leaves  arrays that must be equal before each rank keeps its part of them
identity      structures of trees, functions and other objects, as other processes can compare them
"""
