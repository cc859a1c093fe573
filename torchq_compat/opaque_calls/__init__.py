"""A module as one opaque call of the outer graph: flattening, the call, and the q-dq around it."""
