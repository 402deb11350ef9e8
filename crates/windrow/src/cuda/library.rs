//! Finding CUDA's shared libraries at run time.

use crate::{Device, Error, Result};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The name that every build of NCCL 2 has, and gives itself.
pub(crate) const NCCL: &str = "libnccl.so.2";

/// A library that is loaded at first use.
///
/// Each is looked for in the directories of `WINDROW_CUDA_PATH`, then where the dynamic loader
/// looks (a library that the process has loaded already, as torch's, counts), then in the toolkit
/// (`CUDA_HOME`, `CUDA_PATH`, `/usr/local/cuda`), then in the pip packages `nvidia/*/lib` of the
/// Python environments in sight: that of this process, `VIRTUAL_ENV`, `CONDA_PREFIX`, and those of
/// the programs on `PATH`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Library {
    /// `libcuda`: part of the driver, so only the loader can find it.
    Driver,
    /// `libnvrtc`: the run-time compiler.
    Nvrtc,
    /// `libcublasLt`: matrix products.
    CublasLt,
    /// `libnccl`: communication between devices.
    Nccl,
    /// `libcudnn`: convolutions.
    Cudnn,
}

/// What came of looking for a library.
#[derive(Debug)]
enum Found {
    Whole,
    /// It lacks this function.
    Without(&'static str),
    No,
}

impl Library {
    /// Loads the library, once in a process.
    ///
    /// # Errors
    /// [`Error::NoDevice`] without a driver, [`Error::Backend`] without another library: the
    /// message says how to get it. The same where one is too old to have a function in use.
    pub(crate) fn require(self) -> Result<()> {
        static FOUND: [OnceLock<Found>; 5] = [const { OnceLock::new() }; 5];
        match *FOUND[self as usize].get_or_init(|| self.find()) {
            Found::Whole => Ok(()),
            Found::Without(function) => Err(self.too_old(function)),
            Found::No => Err(self.missing()),
        }
    }

    fn find(self) -> Found {
        if !self.load() {
            return Found::No;
        }
        let Some(library) = self.open() else { return Found::No };
        // SAFETY: the function is looked up, not called.
        let has = |name: &&&str| unsafe { library.get::<unsafe extern "C" fn()>(name.as_bytes()) };
        match self.functions().iter().find(|name| has(name).is_err()) {
            Some(name) => Found::Without(name),
            None => Found::Whole,
        }
    }

    fn load(self) -> bool {
        if self == Library::Driver {
            return self.loader_finds();
        }
        let find = |dirs: Vec<PathBuf>| dirs.iter().any(|d| load_from(d, self.stem()));
        find(explicit_directories()) && self.loader_finds()
            || self.loader_finds()
            || find(toolkit_directories().chain(python_directories()).collect())
                && self.loader_finds()
    }

    /// True if the bindings will find the library.
    fn loader_finds(self) -> bool {
        self.open().is_some()
    }

    /// The library by name, as the bindings open it: a library that is loaded already matches,
    /// whatever directory it came from.
    ///
    /// The bindings can be asked themselves only where they load libraries at run time, and not in a program
    /// with a crate that makes them link, as candle's CUDA backend does.
    pub(super) fn open(self) -> Option<libloading::Library> {
        let versions: &[&str] = match self {
            // A copy that is loaded, as torch's, is known by this name; the bare one may be another copy's.
            Library::Cudnn => &[".9", ""],
            _ => &["", ".13", ".12", ".1"],
        };
        versions.iter().find_map(|version| {
            // SAFETY: a CUDA library; loading it runs only its own initialisation.
            unsafe { libloading::Library::new(format!("{}{version}", self.stem())) }.ok()
        })
    }

    const fn stem(self) -> &'static str {
        match self {
            Library::Driver => "libcuda.so",
            Library::Nvrtc => "libnvrtc.so",
            Library::CublasLt => "libcublasLt.so",
            Library::Nccl => NCCL,
            Library::Cudnn => "libcudnn.so",
        }
    }

    /// What is called through the bindings, which panic where it is missing.
    const fn functions(self) -> &'static [&'static str] {
        match self {
            Library::Driver => &[
                "cuCtxGetCurrent",
                "cuCtxGetStreamPriorityRange",
                "cuCtxPopCurrent_v2",
                "cuCtxPushCurrent_v2",
                "cuCtxSynchronize",
                "cuDeviceCanAccessPeer",
                "cuDeviceGet",
                "cuDeviceGetAttribute",
                "cuDeviceGetCount",
                "cuDeviceGetDefaultMemPool",
                "cuDeviceGetName",
                "cuDevicePrimaryCtxRetain",
                "cuDeviceTotalMem_v2",
                "cuDriverGetVersion",
                "cuEventCreate",
                "cuEventDestroy_v2",
                "cuEventQuery",
                "cuEventRecord",
                "cuEventSynchronize",
                "cuFuncSetAttribute",
                "cuGetErrorName",
                "cuGetErrorString",
                "cuGraphDestroy",
                "cuGraphExecDestroy",
                "cuGraphInstantiateWithFlags",
                "cuGraphLaunch",
                "cuGraphRetainUserObject",
                "cuInit",
                "cuLaunchKernelEx",
                "cuMemAllocAsync",
                "cuMemAlloc_v2",
                "cuMemFreeAsync",
                "cuMemFreeHost",
                "cuMemFree_v2",
                "cuMemHostAlloc",
                "cuMemPoolSetAccess",
                "cuMemPoolSetAttribute",
                "cuMemcpyDtoHAsync_v2",
                "cuMemcpyDtoH_v2",
                "cuMemcpyHtoDAsync_v2",
                "cuMemcpyHtoD_v2",
                "cuMemsetD8Async",
                "cuMemsetD8_v2",
                "cuModuleGetFunction",
                "cuModuleLoadData",
                "cuStreamBeginCapture_v2",
                "cuStreamCreate",
                "cuStreamCreateWithPriority",
                "cuStreamDestroy_v2",
                "cuStreamEndCapture",
                "cuStreamGetId",
                "cuStreamIsCapturing",
                "cuStreamSynchronize",
                "cuStreamWaitEvent",
                "cuTensorMapEncodeTiled",
                "cuThreadExchangeStreamCaptureMode",
                "cuUserObjectCreate",
                "cuUserObjectRelease",
            ],
            Library::Nvrtc => &[
                "nvrtcCompileProgram",
                "nvrtcCreateProgram",
                "nvrtcDestroyProgram",
                "nvrtcGetCUBIN",
                "nvrtcGetCUBINSize",
                "nvrtcGetErrorString",
                "nvrtcGetNumSupportedArchs",
                "nvrtcGetPTX",
                "nvrtcGetPTXSize",
                "nvrtcGetProgramLog",
                "nvrtcGetProgramLogSize",
                "nvrtcGetSupportedArchs",
                "nvrtcVersion",
            ],
            Library::CublasLt => &[
                "cublasLtCreate",
                "cublasLtMatmul",
                "cublasLtMatmulAlgoGetHeuristic",
                "cublasLtMatmulDescCreate",
                "cublasLtMatmulDescDestroy",
                "cublasLtMatmulDescSetAttribute",
                "cublasLtMatmulPreferenceCreate",
                "cublasLtMatmulPreferenceDestroy",
                "cublasLtMatmulPreferenceSetAttribute",
                "cublasLtMatrixLayoutCreate",
                "cublasLtMatrixLayoutDestroy",
                "cublasLtMatrixLayoutSetAttribute",
            ],
            // Called by addresses that were looked up.
            Library::Nccl | Library::Cudnn => &[],
        }
    }

    fn too_old(self, function: &str) -> Error {
        let detail = format!("it has no function `{function}`, which CUDA 12.0 and later have");
        match self {
            Library::Driver => Error::NoDevice {
                device: "cuda".into(),
                reason: format!("the NVIDIA driver is too old: {detail}"),
            },
            _ => Error::Backend {
                what: format!("loading {}", self.stem().trim_end_matches(".so")),
                device: Device::Cuda(0),
                detail,
            },
        }
    }

    fn missing(self) -> Error {
        let (what, package) = match self {
            Library::Driver => {
                return Error::NoDevice {
                    device: "cuda".into(),
                    reason: "the NVIDIA driver (libcuda.so.1) was not found".into(),
                };
            }
            Library::Nvrtc => ("loading libnvrtc", "nvidia-cuda-nvrtc"),
            Library::CublasLt => ("loading libcublasLt", "nvidia-cublas"),
            Library::Nccl => ("loading libnccl", "nvidia-nccl-cu13"),
            Library::Cudnn => ("loading libcudnn", "nvidia-cudnn-cu13"),
        };
        Error::Backend {
            what: what.into(),
            device: Device::Cuda(0),
            detail: format!(
                "not found on the loader's path, in a CUDA toolkit or in a Python environment; \
                 install a toolkit or `pip install {package}`, or name its directory in \
                 WINDROW_CUDA_PATH"
            ),
        }
    }
}

/// Loads the newest `stem*` in `dir` for the life of the process; false if there is none.
fn load_from(dir: &Path, stem: &str) -> bool {
    // NVRTC opens a companion by bare name, which its own directory must provide.
    if stem == "libnvrtc.so" {
        load_newest(dir, "libnvrtc-builtins.so");
    }
    load_newest(dir, stem)
}

fn load_newest(dir: &Path, stem: &str) -> bool {
    let Ok(entries) = std::fs::read_dir(dir) else { return false };
    let mut files: Vec<_> = entries
        .flatten()
        .map(|e| e.path())
        .filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with(stem)))
        .collect();
    files.sort_by_cached_key(|file| version_of(file, stem));
    files.iter().rev().any(|file| {
        // SAFETY: a CUDA library; loading it runs only its own initialisation.
        match unsafe { libloading::Library::new(file) } {
            Ok(library) => {
                tracing::debug!(file = %file.display(), "loaded");
                // Stays loaded: the bindings hold pointers into it.
                std::mem::forget(library);
                true
            }
            Err(error) => {
                tracing::debug!(file = %file.display(), %error, "not loadable");
                false
            }
        }
    })
}

/// The numbers behind the stem: `libnvrtc.so.11.2` is older than `libnvrtc.so.13`, and `.so.9` than `.so.12`.
fn version_of(file: &Path, stem: &str) -> Vec<u64> {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let behind = name.strip_prefix(stem).unwrap_or_default();
    behind.split('.').filter_map(|part| part.parse().ok()).collect()
}

fn env_paths(name: &str) -> Vec<PathBuf> {
    std::env::var_os(name).map(|v| std::env::split_paths(&v).collect()).unwrap_or_default()
}

fn explicit_directories() -> Vec<PathBuf> {
    env_paths("WINDROW_CUDA_PATH")
}

fn toolkit_directories() -> impl Iterator<Item = PathBuf> {
    ["CUDA_HOME", "CUDA_PATH"]
        .into_iter()
        .flat_map(env_paths)
        .chain([PathBuf::from("/usr/local/cuda")])
        .flat_map(|root| [root.join("lib64"), root.join("targets/x86_64-linux/lib")])
}

/// `nvidia/*/lib` of every Python environment in sight.
fn python_directories() -> impl Iterator<Item = PathBuf> {
    let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"]
        .into_iter()
        .flat_map(env_paths)
        .chain(env_paths("PATH").into_iter().filter_map(|bin| Some(bin.parent()?.to_path_buf())))
        .flat_map(|prefix| subdirectories(&prefix.join("lib"), "python3"))
        .map(|python| python.join("site-packages"));
    own_site_packages().into_iter().chain(environments).flat_map(|site| {
        subdirectories(&site.join("nvidia"), "").into_iter().map(|package| package.join("lib"))
    })
}

/// The `site-packages` that this process has loaded extensions from: inside Python, its own.
fn own_site_packages() -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let (line, end) = maps.lines().find_map(|l| Some((l, l.find("/site-packages/")?)))?;
    Some(PathBuf::from(&line[line.find('/')?..end]).join("site-packages"))
}

fn subdirectories(dir: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let mut found: Vec<_> = entries
        .flatten()
        .filter(|e| e.file_name().to_string_lossy().starts_with(prefix))
        .map(|e| e.path())
        .collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_without_the_library_is_passed_over() {
        let dir = std::env::temp_dir().join(format!("windrow-library-{}", std::process::id()));
        assert!(!load_from(&dir, "libnvrtc.so"), "no directory");
        std::fs::create_dir_all(&dir).unwrap();
        assert!(!load_from(&dir, "libnvrtc.so"), "empty directory");
        std::fs::write(dir.join("libnvrtc.so.13"), b"not a library").unwrap();
        assert!(!load_from(&dir, "libnvrtc.so"), "not a library");
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn versions_are_compared_as_numbers() {
        let mut names = ["x.so", "x.so.12", "x.so.9", "x.so.13.0.48", "x.so.13", "x.so.12.9"];
        names.sort_by_cached_key(|name| version_of(Path::new(name), "x.so"));
        assert_eq!(names, ["x.so", "x.so.9", "x.so.12", "x.so.12.9", "x.so.13", "x.so.13.0.48"]);
    }

    /// The bindings panic where a function is missing, so that all that are called must be looked for before.
    #[test]
    fn every_function_in_use_is_looked_for() {
        fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
            for entry in std::fs::read_dir(directory).unwrap().flatten() {
                if entry.path().is_dir() {
                    sources(&entry.path(), found);
                } else if entry.path().extension().is_some_and(|e| e == "rs") {
                    found.push(entry.path());
                }
            }
        }
        let mut files = Vec::new();
        sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
        let listed: Vec<_> = [Library::Driver, Library::Nvrtc, Library::CublasLt]
            .iter()
            .flat_map(|library| library.functions())
            .collect();
        let mut called = 0;
        for file in files {
            let text = std::fs::read_to_string(&file).unwrap();
            for part in text.split("sys::").skip(1) {
                let end = part.find(|c: char| !c.is_alphanumeric() && c != '_');
                let name = &part[..end.unwrap_or(part.len())];
                let is_function = ["cu", "nvrtc", "cublasLt"].iter().any(|prefix| {
                    name.strip_prefix(prefix).is_some_and(|n| n.starts_with(char::is_uppercase))
                }) && !name.ends_with("_t");
                if is_function {
                    assert!(listed.iter().any(|l| **l == name), "{name} of {}", file.display());
                    called += 1;
                }
            }
        }
        assert!(called > 60, "{called}");
    }

    #[test]
    fn what_is_missing_says_how_to_get_it() {
        assert!(matches!(Library::Driver.missing(), Error::NoDevice { .. }));
        for (library, package) in [
            (Library::Nvrtc, "nvidia-cuda-nvrtc"),
            (Library::CublasLt, "nvidia-cublas"),
            (Library::Nccl, "nvidia-nccl"),
            (Library::Cudnn, "nvidia-cudnn"),
        ] {
            let error = library.missing();
            assert!(matches!(error, Error::Backend { .. }));
            assert!(error.to_string().contains(package));
        }
    }
}
