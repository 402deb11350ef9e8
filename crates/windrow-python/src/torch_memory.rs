//! PyTorch's tensors as they lie in memory. If no word of a tensor has changed, the tensor has not, and to compare words
//! takes a tenth of the time of asking PyTorch.
//!
//! PyTorch does not promise where a tensor has what. So all its words are compared but the number of references, and the
//! place of its number of writes is found by writing to a tensor.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// The words of PyTorch's structure of a tensor that are read, from the table of functions and the number of references
/// to sizes, type and device. Behind them is at least one more.
const TENSOR: usize = 22;
/// The words behind these two of the structure of a tensor's memory: the address, what frees it, the device and the size.
const STORAGE: usize = 5;
const REFERENCES: usize = 2;
const WORD: usize = size_of::<usize>();

/// A tensor's words as they were.
pub(crate) struct Words {
    /// The word of the Python object that points to the tensor, and the tensor.
    object: usize,
    tensor: usize,
    tensor_words: [usize; TENSOR - REFERENCES],
    storage: usize,
    storage_words: [usize; STORAGE],
    /// The place of the number of writes, and the number. None for tensors that do not count them.
    writes: Option<(usize, u32)>,
}

impl Words {
    /// None for other libraries' arrays, and if the tensor is not as is known here.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        let py = object.py();
        let Some(cdata) = object.getattr_opt(intern!(py, "_cdata"))? else { return Ok(None) };
        let Some(counter) = Counter::of_torch(py)? else { return Ok(None) };
        let tensor: usize = cdata.extract()?;
        let memory = object.call_method0(intern!(py, "untyped_storage"))?;
        let storage: usize = memory.getattr(intern!(py, "_cdata"))?.extract()?;
        let mut after_type = (2..4).map(|i| object.as_ptr().addr() + i * WORD);
        // SAFETY: a tensor's Python object is longer than these words.
        let points = |place: &usize| unsafe { word(*place) } == tensor;
        let Some(place) = after_type.find(points) else { return Ok(None) };
        // SAFETY: the tensor lives, and so does its memory.
        let (tensor_words, storage_words) = unsafe { (words(tensor), words(storage)) };
        // Sizes of many dimensions lie elsewhere.
        let has = |several: Bound<'_, PyAny>| -> PyResult<bool> {
            let several: Vec<usize> = several.extract()?;
            Ok(several.is_empty() || tensor_words.windows(several.len()).any(|w| w == several))
        };
        let address: usize = memory.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let is_as_known = tensor_words.contains(&storage)
            && storage_words.contains(&address)
            && has(object.getattr(intern!(py, "shape"))?)?
            && has(object.call_method0(intern!(py, "stride"))?)?;
        let writes = match object.call_method0(intern!(py, "is_inference"))?.is_truthy()? {
            true => None,
            false => {
                let place = tensor_words[counter.pointer - REFERENCES] + counter.number;
                // SAFETY: tensors that count writes have a counter.
                Some((place, unsafe { number(place) }))
            }
        };
        let words = Words { object: place, tensor, tensor_words, storage, storage_words, writes };
        Ok(is_as_known.then_some(words))
    }

    /// True if no word has changed, and nobody has counted a write. False says nothing.
    ///
    /// # Safety
    /// The Python object lives.
    pub(crate) unsafe fn are_same(&self) -> bool {
        // SAFETY: the object lives; as long as it points to the tensor, that does, and so on.
        unsafe {
            word(self.object) == self.tensor
                && has(self.tensor, &self.tensor_words)
                && has(self.storage, &self.storage_words)
                && self.writes.is_none_or(|(place, before)| number(place) == before)
        }
    }

    /// The places of words that are compared first of each structure, with the bytes that are read there.
    pub(crate) fn reads(&self) -> impl Iterator<Item = (usize, usize)> {
        let writes = self.writes.map(|(place, _)| (place, size_of::<u32>()));
        let structures =
            [(self.tensor, TENSOR * WORD), (self.storage, (REFERENCES + STORAGE) * WORD)];
        [(self.object, WORD)].into_iter().chain(structures).chain(writes)
    }
}

/// The place of a tensor's number of writes.
struct Counter {
    /// The word of the tensor that points to the counter.
    pointer: usize,
    /// The place of the number in the counter, in bytes.
    number: usize,
}

impl Counter {
    /// None if it is not found.
    fn of_torch(py: Python<'_>) -> PyResult<Option<&'static Counter>> {
        static COUNTER: PyOnceLock<Option<Counter>> = PyOnceLock::new();
        COUNTER.get_or_try_init(py, || Counter::find(py)).map(Option::as_ref)
    }

    fn find(py: Python<'_>) -> PyResult<Option<Self>> {
        let torch = py.import("torch")?;
        let counting = torch.call_method1("inference_mode", (false,))?;
        counting.call_method0("__enter__")?;
        let found = Counter::by_writing(&torch);
        counting.call_method1("__exit__", (py.None(), py.None(), py.None()))?;
        found
    }

    fn by_writing(torch: &Bound<'_, PyModule>) -> PyResult<Option<Self>> {
        let new = || torch.call_method1("empty", (4,));
        let (tensor, other) = (new()?, new()?);
        let alias = tensor.call_method0("detach")?;
        let place = |t: &Bound<'_, PyAny>| t.getattr("_cdata")?.extract::<usize>();
        let storage: usize =
            tensor.call_method0("untyped_storage")?.getattr("_cdata")?.extract()?;
        let read = |t: &Bound<'_, PyAny>| {
            // SAFETY: the tensor lives.
            place(t).map(|place| unsafe { words::<{ TENSOR - REFERENCES }>(place) })
        };
        let [own, shared, others] = [read(&tensor)?, read(&alias)?, read(&other)?];
        // A tensor and its alias share their memory and the counter, and nothing else that others do not have as well.
        let is_counter = |&i: &usize| {
            let pointer = own[i];
            pointer == shared[i] && pointer != others[i] && pointer != storage
        };
        let is_pointer = |i: &usize| own[*i] != 0 && own[*i].is_multiple_of(WORD);
        let mut found = (0..own.len()).filter(is_counter);
        let (Some(i), None) = (found.next().filter(is_pointer), found.next()) else {
            return Ok(None);
        };
        // Behind a table of functions and one number of references or two.
        let mut numbers = vec![2 * WORD, 3 * WORD];
        for writes in [5, 12] {
            while tensor.getattr("_version")?.extract::<u32>()? < writes {
                tensor.call_method1("fill_", (1,))?;
            }
            // SAFETY: the counter is at least so long, or the first place is that of the number.
            numbers.retain(|&place| unsafe { number(own[i] + place) } == writes);
        }
        Ok(numbers.first().map(|&number| Counter { pointer: i + REFERENCES, number }))
    }
}

/// # Safety
/// A word may be read there.
unsafe fn word(place: usize) -> usize {
    // SAFETY: as promised. Another thread may write there.
    unsafe { std::ptr::with_exposed_provenance::<usize>(place).read_volatile() }
}

/// # Safety
/// A number may be read there.
unsafe fn number(place: usize) -> u32 {
    // SAFETY: as promised. Another thread may write there.
    unsafe { std::ptr::with_exposed_provenance::<u32>(place).read_volatile() }
}

/// True if a structure has these words behind the number of references.
///
/// # Safety
/// So many words may be read.
unsafe fn has(place: usize, words: &[usize]) -> bool {
    let mut at = place + REFERENCES * WORD;
    words.iter().all(|&before| {
        // SAFETY: as promised.
        let is_same = unsafe { word(at) } == before;
        at += WORD;
        is_same
    })
}

/// The words of a structure behind the number of references.
///
/// # Safety
/// They may be read.
unsafe fn words<const N: usize>(place: usize) -> [usize; N] {
    // SAFETY: as promised.
    std::array::from_fn(|i| unsafe { word(place + (REFERENCES + i) * WORD) })
}
