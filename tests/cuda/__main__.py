from tests.cuda.table import main

main()
