import pkg

prepared = pkg.prep(model, {}, example_inputs)
