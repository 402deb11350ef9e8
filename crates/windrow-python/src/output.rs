//! Results: written into `out=`, or allocated here and handed over as the caller's kind of array.

use crate::array::{Array, Family, fetch};
use crate::dlpack::{self, DLDataType, DLDevice, Export};
use crate::error::IntoPy;
use pyo3::exceptions::PyBufferError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyTuple};
use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use windrow::cuda::DeviceTensor;
use windrow::{DType, Device, Layout, MAX_RANK, Placed, TensorDesc, TensorMut, TensorRef};

/// The destination of a function's result.
pub(crate) enum Output<'py> {
    /// The caller's array.
    Given(Array<'py>, Bound<'py, PyAny>),
    /// A new array of the caller's library.
    New(Array<'py>, Bound<'py, PyAny>),
    /// Memory from the library's cache of freed blocks: a fresh block of the system would cost a
    /// page fault for every 4 KiB on each call.
    Own(Placed),
    /// The same on a GPU, of which the caller gets a copy in main memory.
    Staged(DeviceTensor),
}

impl<'py> Output<'py> {
    /// `out` if given, else an array of this description beside `like`.
    pub(crate) fn new(
        py: Python<'py>,
        out: Option<&Bound<'py, PyAny>>,
        like: &Array<'py>,
        desc: impl FnOnce() -> PyResult<TensorDesc>,
    ) -> PyResult<Self> {
        if let Some(out) = out {
            let device = like.is_staged().then_some(like.device);
            return Ok(Output::Given(Array::import_on("out", out, device)?, out.clone()));
        }
        let desc = desc()?;
        Ok(match like.device {
            Device::Cpu => Output::Own(Placed::output(desc, Device::Cpu).py()?),
            gpu if like.is_staged() => {
                Output::Staged(py.detach(|| DeviceTensor::new(desc, gpu)).py()?)
            }
            device => match &like.family {
                Family::Exchange(_, object) | Family::Torch(object) => {
                    let out = EmptyTensor::beside(object, &desc)?.make(py)?;
                    Output::New(Array::import("out", &out)?, out)
                }
                Family::NumPyBf16(_) | Family::Other(_) => {
                    Output::Own(py.detach(|| Placed::output(desc, device)).py()?)
                }
            },
        })
    }

    pub(crate) fn desc(&self) -> TensorDesc {
        match self {
            Output::Given(array, _) | Output::New(array, _) => array.desc,
            Output::Own(tensor) => *tensor.desc(),
            Output::Staged(tensor) => *tensor.desc(),
        }
    }

    pub(crate) fn view_mut(&mut self) -> PyResult<TensorMut<'_>> {
        match self {
            Output::Given(array, _) => array.view_changed(),
            Output::New(array, _) => array.view_mut(),
            Output::Own(tensor) => tensor.as_mut().py(),
            Output::Staged(tensor) => tensor.as_mut().py(),
        }
    }

    /// A gradient of the shape and type of `of`, unless nobody needs it.
    pub(crate) fn gradient(
        py: Python<'py>,
        of: Option<&Array<'py>>,
        needed: bool,
    ) -> PyResult<Option<Self>> {
        of.filter(|_| needed).map(|a| Output::new(py, None, a, || like(a))).transpose()
    }

    /// [`Output::view_mut`] of an optional result.
    pub(crate) fn view_mut_option(output: &mut Option<Self>) -> PyResult<Option<TensorMut<'_>>> {
        output.as_mut().map(Output::view_mut).transpose()
    }

    /// [`Output::finish`] of those results that there are.
    pub(crate) fn finish_all<const N: usize>(
        py: Python<'py>,
        outputs: [Option<Self>; N],
        family: &Family<'py>,
    ) -> PyResult<[Option<Bound<'py, PyAny>>; N]> {
        let mut finished = [const { None }; N];
        for (object, output) in finished.iter_mut().zip(outputs) {
            *object = output.map(|o| o.finish(py, family)).transpose()?;
        }
        Ok(finished)
    }

    /// The object to return.
    pub(crate) fn finish(
        self,
        py: Python<'py>,
        family: &Family<'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        match self {
            Output::Given(array, object) => {
                array.fetch(py)?;
                Ok(object)
            }
            Output::New(_, object) => Ok(object),
            Output::Own(owned) => family.take(owned),
            Output::Staged(tensor) => {
                let mut host = windrow::Tensor::uninitialised(*tensor.desc()).py()?;
                fetch(py, &tensor, host.as_mut().as_mut_ptr()).py()?;
                family.take(Placed::new(host, Device::Cpu).py()?)
            }
        }
    }
}

impl<'py> Family<'py> {
    /// The stream of a GPU that the library gives its work to, if it says so.
    pub(crate) fn current_stream(&self, gpu: Device) -> PyResult<Option<*mut c_void>> {
        let DLDevice { device_type, device_id } = DLDevice::new(gpu);
        match self {
            Family::Exchange(api, like) => {
                let mut stream = null_mut();
                // SAFETY: a function of the library's table; it fills the stream or sets an
                // exception.
                match unsafe { (api.current_stream)(device_type, device_id, &mut stream) } {
                    0 => Ok(Some(stream)),
                    _ => Err(PyErr::fetch(like.py())),
                }
            }
            Family::Torch(like) => {
                let c = like.py().import("torch")?.getattr("_C")?;
                let stream = c.call_method1("_cuda_getCurrentRawStream", (device_id,))?;
                Ok(Some(std::ptr::with_exposed_provenance_mut(stream.extract()?)))
            }
            _ => Ok(None),
        }
    }

    /// Hands a tensor over as an array of this library.
    fn take(&self, tensor: Placed) -> PyResult<Bound<'py, PyAny>> {
        match self {
            Family::Exchange(api, like) => {
                let managed = export(tensor, Placed::as_ref, None).versioned();
                let mut object = std::ptr::null_mut();
                // SAFETY: the function takes the managed tensor over and returns a new object or
                // sets an exception.
                unsafe {
                    (api.to_object)(managed, &mut object);
                    Bound::from_owned_ptr_or_err(like.py(), object)
                }
            }
            Family::NumPyBf16(like) => {
                let py = like.py();
                let bits = Tensor { tensor: Arc::new(tensor), bits_of_bf16: true };
                let array = numpy(py)?.call_method1(intern!(py, "from_dlpack"), (bits,))?;
                array.call_method1(intern!(py, "view"), (like.getattr(intern!(py, "dtype"))?,))
            }
            Family::Torch(like) => {
                let py = like.py();
                py.import("torch")?.call_method1(intern!(py, "from_dlpack"), (Tensor::new(tensor),))
            }
            Family::Other(like) => {
                let py = like.py();
                let tensor = Bound::new(py, Tensor::new(tensor))?;
                match namespace(like)? {
                    Some(library) => library.call_method1(intern!(py, "from_dlpack"), (tensor,)),
                    None => Ok(tensor.into_any()),
                }
            }
        }
    }
}

/// The module whose `from_dlpack` makes arrays of the object's kind.
fn namespace<'py>(like: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = like.py();
    if let Some(method) = like.getattr_opt(intern!(py, "__array_namespace__"))? {
        return Ok(Some(method.call0()?));
    }
    let module = like.get_type().module()?;
    // CuPy has no `__array_namespace__` before version 14.
    match module.to_cow()?.split('.').next() {
        Some("cupy") => Ok(Some(py.import("cupy")?.into_any())),
        _ => Ok(None),
    }
}

fn numpy(py: Python<'_>) -> PyResult<Bound<'_, PyModule>> {
    py.import(intern!(py, "numpy"))
}

/// Memory of PyTorch's allocator, for work on its current stream as long as the tensor lives: a pool of our own
/// beside it would share nothing with what PyTorch has freed.
pub(crate) fn scratch<'py>(
    py: Python<'py>,
    empty: &EmptyTensor,
) -> PyResult<(Bound<'py, PyAny>, *mut c_void)> {
    let memory = empty.make(py)?;
    let address = Array::import("workspace", &memory)?.address();
    Ok((memory, address))
}

/// `torch.empty_strided` with its arguments: PyTorch's allocator knows the stream.
pub(crate) struct EmptyTensor {
    function: Py<PyAny>,
    sizes: Py<PyTuple>,
    how: Py<PyDict>,
    /// None on other devices than CUDA, and for a PyTorch that has no such function.
    short: Option<Short>,
}

/// The function by which code that Inductor made allocates tensors on the current CUDA device, with its arguments. It
/// takes 2 us less than `torch.empty_strided`.
struct Short {
    function: Py<PyAny>,
    arguments: Py<PyTuple>,
    current_device: Py<PyAny>,
    device: i64,
}

impl Short {
    /// `sizes` are shape and strides.
    fn of(
        torch: &Bound<'_, PyModule>,
        device: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyTuple>,
        dtype: &Bound<'_, PyAny>,
    ) -> PyResult<Option<Self>> {
        let py = torch.py();
        let is_cuda = device.getattr(intern!(py, "type"))?.eq("cuda")?;
        let Some(index) = device.getattr(intern!(py, "index"))?.extract()? else { return Ok(None) };
        let found = || -> PyResult<_> {
            let c = torch.getattr("_C")?;
            let guards = c.getattr("_dynamo")?.getattr("guards")?;
            Ok((guards.getattr("_empty_strided_cuda")?, c.getattr("_cuda_getDevice")?))
        };
        let Some((function, current_device)) = is_cuda.then(found).and_then(Result::ok) else {
            return Ok(None);
        };
        let arguments = (sizes.get_item(0)?, sizes.get_item(1)?, dtype).into_pyobject(py)?;
        let (function, arguments) = (function.unbind(), arguments.unbind());
        Ok(Some(Short {
            function,
            arguments,
            current_device: current_device.unbind(),
            device: index,
        }))
    }

    /// None if another device is the current one.
    fn make<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let now: i64 = self.current_device.bind(py).call0()?.extract()?;
        let make = || self.function.bind(py).call1(self.arguments.bind(py));
        (now == self.device).then(make).transpose()
    }
}

impl EmptyTensor {
    /// A new tensor on the device of the tensor `like`.
    pub(crate) fn beside(like: &Bound<'_, PyAny>, desc: &TensorDesc) -> PyResult<Self> {
        let py = like.py();
        let how = PyDict::new(py);
        let device = like.getattr(intern!(py, "device"))?;
        how.set_item("device", &device)?;
        let torch = py.import(intern!(py, "torch"))?;
        let dtype = torch.getattr(dlpack::torch_name(desc.dtype))?;
        how.set_item("dtype", &dtype)?;
        let (shape, strides) = (PyTuple::new(py, desc.shape())?, PyTuple::new(py, desc.strides())?);
        let sizes = PyTuple::new(py, [shape, strides])?;
        Ok(EmptyTensor {
            function: torch.getattr(intern!(py, "empty_strided"))?.unbind(),
            short: Short::of(&torch, &device, &sizes, &dtype)?,
            sizes: sizes.unbind(),
            how: how.unbind(),
        })
    }

    /// A new tensor of so many bytes, and perhaps some more.
    pub(crate) fn bytes_beside(like: &Bound<'_, PyAny>, bytes: usize) -> PyResult<Self> {
        let words = bytes.div_ceil(DType::I64.size());
        Self::beside(like, &TensorDesc::contiguous(DType::I64, &[words]).py()?)
    }

    pub(crate) fn make<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        if let Some(short) = &self.short
            && let Some(made) = short.make(py)?
        {
            return Ok(made);
        }
        self.function.bind(py).call(self.sizes.bind(py), Some(self.how.bind(py)))
    }
}

/// Type, shape and order of dimensions of an array, dense.
pub(crate) fn like(array: &Array<'_>) -> PyResult<TensorDesc> {
    Ok(TensorDesc::new(array.desc.dtype, dense_like(&array.desc.layout)?))
}

/// A dense layout whose dimensions lie in memory in the order of those of `layout`: the same
/// strides where it is dense already, what `torch.empty_like` gives elsewhere.
pub(crate) fn dense_like(layout: &Layout) -> PyResult<Layout> {
    let (shape, strides) = (layout.shape(), layout.strides());
    let spans = |l: &Layout| {
        l.is_unique()
            && l.extent().is_none_or(|(low, high)| low == 0 && high as usize + 1 == l.len())
    };
    let dense = layout.is_contiguous() || spans(layout);
    if strides.iter().all(|&s| s >= 0) && dense && !layout.is_empty() {
        return Ok(*layout);
    }
    // Insertion sort, innermost first, that leaves dimensions in place whose order the strides do
    // not tell (broadcast ones).
    let mut order = [0usize; MAX_RANK];
    let order = &mut order[..shape.len()];
    for (o, d) in order.iter_mut().zip((0..shape.len()).rev()) {
        *o = d;
    }
    let compare = |a: usize, b: usize| match (strides[a].abs(), strides[b].abs()) {
        (0, _) | (_, 0) => std::cmp::Ordering::Equal,
        (x, y) => x.cmp(&y).then(shape[a].cmp(&shape[b])),
    };
    for i in 1..order.len() {
        let mut moving = i;
        for earlier in (0..i).rev() {
            match compare(order[earlier], order[moving]) {
                std::cmp::Ordering::Greater => {
                    order.swap(earlier, moving);
                    moving = earlier;
                }
                std::cmp::Ordering::Less => break,
                std::cmp::Ordering::Equal => {}
            }
        }
    }
    order.reverse();
    Layout::with_order(shape, order).py()
}

/// A result for a caller whose array type Windrow does not know. It supports DLPack only.
#[pyclass(module = "windrow", frozen)]
pub(crate) struct Tensor {
    tensor: Arc<Placed>,
    /// True if the memory holds bf16 that NumPy, which has no such type, gets as bits.
    bits_of_bf16: bool,
}

impl Tensor {
    fn new(tensor: Placed) -> Self {
        Tensor { tensor: Arc::new(tensor), bits_of_bf16: false }
    }
}

#[pymethods]
impl Tensor {
    /// Size of each dimension.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.tensor.as_ref().as_ref().shape())
    }

    /// `f32`, `f16`, `bf16`, ...
    #[getter]
    fn dtype(&self) -> &'static str {
        self.tensor.as_ref().as_ref().dtype().name()
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let device = self.__dlpack_device__();
        // On a GPU the call that made the tensor has waited for it: there is nothing to order.
        if stream.is_some() && device.0 == dlpack::CPU {
            return Err(PyBufferError::new_err("a tensor in main memory has no stream"));
        }
        if dl_device.is_some_and(|d| d != device) || copy == Some(true) {
            return Err(PyBufferError::new_err("a tensor is exported in place only, without copy"));
        }
        let dtype = self.bits_of_bf16.then_some(DLDataType::UINT16);
        let export = export(self.tensor.clone(), |t| t.as_ref().as_ref(), dtype);
        let (managed, name) = if max_version.is_some_and(|(major, _)| major >= 1) {
            (NonNull::new(export.versioned().cast()), dlpack::VERSIONED_NAME)
        } else {
            (NonNull::new(export.unversioned().cast()), dlpack::UNVERSIONED_NAME)
        };
        let managed = managed.expect("a box has an address");
        // SAFETY: the destructor frees what the capsule still holds when it goes.
        unsafe {
            PyCapsule::new_with_pointer_and_destructor(
                py,
                managed,
                name,
                Some(dlpack::drop_capsule),
            )
        }
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        let device = dlpack::DLDevice::new(self.tensor.as_ref().as_ref().device());
        (device.device_type, device.device_id)
    }
}

/// Shares a tensor with a consumer, which may write to it: whoever makes a [`Tensor`] gives its
/// memory away.
fn export<O: Send>(
    owner: O,
    view: impl for<'a> Fn(&'a O) -> TensorRef<'a>,
    dtype: Option<DLDataType>,
) -> Export<O> {
    let view = view(&owner);
    let (data, desc, device) = (view.as_ptr().cast_mut().cast(), *view.desc(), view.device());
    let dtype = dtype.unwrap_or(DLDataType::new(desc.dtype));
    Export { owner, data, desc, device, dtype }
}
