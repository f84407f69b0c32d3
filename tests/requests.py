"""What `tests.facade` has, by its former name: for folders that take it from here."""

from tests.facade import built as built
from tests.facade import dataset as dataset
from tests.facade import request as request
from tests.facade import request_of as request_of
