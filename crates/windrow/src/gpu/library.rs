//! Shared libraries that are loaded at run time, as tables of their functions.

use super::runtime::Failure;
use crate::{Device, Error, Result};
use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};

/// The search paths of a vendor's libraries. A library is searched in this order:
///
/// 1. the directories that `explicit` lists;
/// 2. the dynamic loader's paths, where a library that the process has already loaded (such as PyTorch's) counts;
/// 3. toolkits;
/// 4. the packages of the Python environments: that of this process, `VIRTUAL_ENV`, `CONDA_PREFIX`, and those of the
///    programs on `PATH`.
#[derive(Debug)]
pub(crate) struct Places {
    /// An environment variable that lists directories.
    pub(crate) explicit: &'static str,
    /// Environment variables that name toolkits.
    pub(crate) toolkits: &'static [&'static str],
    /// The usual place of a toolkit.
    pub(crate) installed: &'static str,
    /// Directories of a toolkit that hold libraries.
    pub(crate) directories: &'static [&'static str],
    /// Folders of `site-packages` that hold libraries; `*` stands for any name.
    pub(crate) packages: &'static [&'static str],
}

/// A library, and how to get it.
#[derive(Debug)]
pub(crate) struct Library {
    /// `libcudnn.so`: its file's name without a version.
    pub(crate) stem: &'static str,
    /// The version suffixes to try after the stem, in this order.
    pub(crate) versions: &'static [&'static str],
    /// The stem of a library that this one opens by bare name, from its own directory.
    pub(crate) companion: Option<&'static str>,
    /// `None` if only the loader can find it.
    pub(crate) places: Option<&'static Places>,
    /// The pip package that holds it; empty for the driver and for ROCm's libraries.
    pub(crate) package: &'static str,
    /// The first version that has all functions in use.
    pub(crate) since: &'static str,
    pub(crate) device: Device,
}

/// Why a library cannot be used.
#[derive(Debug)]
pub(crate) enum Absent {
    NotFound,
    /// The library lacks this function.
    Without(&'static str),
}

/// A library whose calls return a status, which is 0 on success.
pub(crate) trait Describe {
    /// The library's text for a status.
    fn describe(&self, status: c_int) -> String;

    fn check(&self, call: &'static str, status: c_int) -> Result<(), Failure> {
        match status {
            0 => Ok(()),
            _ => Err(Failure { call, status, words: self.describe(status) }),
        }
    }
}

/// Declares the functions of a library: a structure with a method for each, and `get`, which loads the library at first
/// use. Functions without a result return a status, and their methods an [`Outcome`](super::Outcome).
macro_rules! library {
    (
        $(#[$about:meta])*
        $vis:vis struct $name:ident in $library:expr;
        $(fn $function:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)?;)*
    ) => {
        $(#[$about])*
        #[allow(non_snake_case)]
        $vis struct $name {
            $($function: unsafe extern "C" fn($($type),*) -> library!(@result $($result)?),)*
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(stringify!($name))
            }
        }

        #[allow(non_snake_case, clippy::too_many_arguments)]
        impl $name {
            /// The library, which stays loaded for the life of the process.
            ///
            /// # Errors
            /// If the library is missing or too old: [`Error::NoDevice`] for the driver and ROCm's libraries,
            /// [`Error::Backend`] for others. The message says how to get it.
            $vis fn get() -> $crate::Result<&'static Self> {
                static LOADED: std::sync::OnceLock<Result<$name, $crate::gpu::library::Absent>> =
                    std::sync::OnceLock::new();
                let loaded = LOADED.get_or_init(|| {
                    let library = $library.open()?;
                    // SAFETY: functions of the library.
                    let functions = unsafe { $name::of(|name| $crate::gpu::library::symbol(&library, name)) }?;
                    // It must outlive the functions.
                    std::mem::forget(library);
                    Ok(functions)
                });
                loaded.as_ref().map_err(|absent| $library.error(absent))
            }

            /// The functions at the addresses that `find` returns for their names.
            ///
            /// # Safety
            /// The functions must have the types of the library's headers, and must stay valid.
            $vis unsafe fn of(
                find: impl Fn(&'static str) -> Option<*const std::ffi::c_void>,
            ) -> Result<Self, $crate::gpu::library::Absent> {
                // SAFETY: the types are those of the library's headers.
                unsafe {
                    Ok($name { $($function: $crate::gpu::library::function(&find, stringify!($function))?,)* })
                }
            }

            $(library!(@method $vis $function ($($argument: $type),*) $(-> $result)?);)*
        }
    };
    (@result) => { std::ffi::c_int };
    (@result $result:ty) => { $result };
    (@method $vis:vis $function:ident ($($argument:ident: $type:ty),*)) => {
        $vis unsafe fn $function(&self, $($argument: $type),*) -> $crate::gpu::Outcome<()> {
            // SAFETY: the caller's promise.
            let status = unsafe { (self.$function)($($argument),*) };
            $crate::gpu::library::Describe::check(self, stringify!($function), status)
        }
    };
    (@method $vis:vis $function:ident ($($argument:ident: $type:ty),*) -> $result:ty) => {
        $vis unsafe fn $function(&self, $($argument: $type),*) -> $result {
            // SAFETY: the caller's promise.
            unsafe { (self.$function)($($argument),*) }
        }
    };
}
pub(crate) use library;

/// [`Describe`] for a library one of whose functions returns a static string for any status.
macro_rules! describe {
    ($name:ident by $function:ident) => {
        impl $crate::gpu::library::Describe for $name {
            fn describe(&self, status: std::ffi::c_int) -> String {
                // SAFETY: it takes any number, and what it returns stays.
                let words = unsafe { std::ffi::CStr::from_ptr(self.$function(status)) };
                words.to_string_lossy().into()
            }
        }
    };
}
pub(crate) use describe;

/// The address of a function of a library.
pub(crate) fn symbol(library: &libloading::Library, name: &str) -> Option<*const c_void> {
    // SAFETY: its address is taken, whatever it is.
    unsafe { library.get::<*const c_void>(name) }.map(|address| *address).ok()
}

/// A function by its name.
///
/// # Safety
/// `F` must be the type of the function at the address that `find` returns. That function must stay loaded as long as
/// the result is used.
pub(crate) unsafe fn function<F: Copy>(
    find: impl Fn(&'static str) -> Option<*const c_void>,
    name: &'static str,
) -> Result<F, Absent> {
    const { assert!(size_of::<F>() == size_of::<*const c_void>()) };
    let address = find(name).filter(|address| !address.is_null()).ok_or(Absent::Without(name))?;
    // SAFETY: the caller's promise; both are pointers.
    Ok(unsafe { std::mem::transmute_copy(&address) })
}

impl Library {
    pub(crate) fn open(&self) -> Result<libloading::Library, Absent> {
        let find = |dirs: Vec<PathBuf>| dirs.iter().find_map(|dir| self.load_from(dir));
        let explicit = self.places.map_or(Vec::new(), |p| env_paths(p.explicit));
        let found = find(explicit).or_else(|| self.by_name()).or_else(|| {
            let places = self.places?;
            find(places.of_toolkits().chain(places.of_python()).collect())
        });
        found.ok_or(Absent::NotFound)
    }

    /// The library by name. One that is loaded already matches, whatever directory it came from.
    fn by_name(&self) -> Option<libloading::Library> {
        self.versions.iter().find_map(|version| {
            // SAFETY: a vendor's library; loading it runs only its own initialisation.
            unsafe { libloading::Library::new(format!("{}{version}", self.stem)) }.ok()
        })
    }

    /// The newest `stem*` in `dir`.
    fn load_from(&self, dir: &Path) -> Option<libloading::Library> {
        if let Some(companion) = self.companion {
            std::mem::forget(load_newest(dir, companion));
        }
        load_newest(dir, self.stem)
    }

    /// The error if the library is missing or incomplete.
    pub(crate) fn error(&self, absent: &Absent) -> Error {
        let name = self.stem.trim_end_matches(".so");
        let (device, since) = (self.device, self.since);
        let reason = match (absent, self.places) {
            (Absent::Without(function), _) => {
                format!("it has no function `{function}`, which {since} and later have")
            }
            (Absent::NotFound, Some(Places { explicit, .. })) => {
                let install = match self.package {
                    "" => String::new(),
                    package => format!(" or `pip install {package}`"),
                };
                format!(
                    "{name} was not found on the loader's path, in a toolkit or in a Python environment; \
                     install a toolkit{install}, or name its directory in {explicit}"
                )
            }
            (Absent::NotFound, None) => format!("the driver ({name}) was not found"),
        };
        let is_driver = self.package.is_empty();
        match absent {
            _ if !is_driver => {
                Error::Backend { what: format!("loading {name}"), device, detail: reason }
            }
            Absent::NotFound => Error::NoDevice { device: device.backend().into(), reason },
            Absent::Without(_) => {
                let reason = format!("the driver is too old: {reason}");
                Error::NoDevice { device: device.backend().into(), reason }
            }
        }
    }
}

impl Places {
    fn of_toolkits(&self) -> impl Iterator<Item = PathBuf> {
        self.toolkits
            .iter()
            .flat_map(|variable| env_paths(variable))
            .chain([PathBuf::from(self.installed)])
            .flat_map(|root| self.directories.iter().map(move |d| root.join(d)))
    }

    /// The folders in packages of every Python environment that [`Places`] names.
    fn of_python(&self) -> impl Iterator<Item = PathBuf> {
        let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"]
            .into_iter()
            .flat_map(env_paths)
            .chain(
                env_paths("PATH").into_iter().filter_map(|bin| Some(bin.parent()?.to_path_buf())),
            )
            .flat_map(|prefix| subdirectories(&prefix.join("lib"), "python3"))
            .map(|python| python.join("site-packages"));
        own_site_packages()
            .into_iter()
            .chain(environments)
            .flat_map(|site| self.packages.iter().flat_map(move |path| matching(&site, path)))
    }
}

fn load_newest(dir: &Path, stem: &str) -> Option<libloading::Library> {
    let mut files: Vec<_> = std::fs::read_dir(dir)
        .ok()?
        .flatten()
        .map(|e| e.path())
        .filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with(stem)))
        .collect();
    files.sort_by_cached_key(|file| version_of(file, stem));
    files.iter().rev().find_map(|file| {
        // SAFETY: a vendor's library; loading it runs only its own initialisation.
        unsafe { libloading::Library::new(file) }
            .inspect(|_| tracing::debug!(file = %file.display(), "loaded"))
            .inspect_err(|error| tracing::debug!(file = %file.display(), %error, "not loadable"))
            .ok()
    })
}

/// The numbers after the stem: `libnvrtc.so.11.2` is older than `libnvrtc.so.13`, and `.so.9` than `.so.12`.
fn version_of(file: &Path, stem: &str) -> Vec<u64> {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let behind = name.strip_prefix(stem).unwrap_or_default();
    behind.split('.').filter_map(|part| part.parse().ok()).collect()
}

fn env_paths(name: &str) -> Vec<PathBuf> {
    std::env::var_os(name).map(|v| std::env::split_paths(&v).collect()).unwrap_or_default()
}

/// The `site-packages` that this process has loaded extensions from: inside Python, its own.
fn own_site_packages() -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let (line, end) = maps.lines().find_map(|l| Some((l, l.find("/site-packages/")?)))?;
    Some(PathBuf::from(&line[line.find('/')?..end]).join("site-packages"))
}

/// The directories of `path` in `dir`, where `*` stands for any name.
fn matching(dir: &Path, path: &str) -> Vec<PathBuf> {
    path.split('/').fold(vec![dir.to_path_buf()], |found, name| match name {
        "*" => found.iter().flat_map(|dir| subdirectories(dir, "")).collect(),
        _ => found.into_iter().map(|dir| dir.join(name)).collect(),
    })
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

    library! {
        /// A part of the C library.
        struct Lengths in LIBC;
        fn strlen(text: *const std::ffi::c_char) -> usize;
        fn abs(number: c_int);
    }

    mod impossible {
        #![allow(dead_code, reason = "it cannot be had")]

        library! {
            pub(super) struct Impossible in super::LIBC;
            fn strlen(text: *const std::ffi::c_char) -> usize;
            fn windrow_has_no_such_function();
        }
    }
    use impossible::Impossible;

    static PLACES: Places = Places {
        explicit: "WINDROW_TEST_PATH",
        toolkits: &[],
        installed: "/nowhere",
        directories: &["lib"],
        packages: &["nobody/*/lib"],
    };
    static LIBC: Library = Library {
        stem: "libc.so",
        versions: &[".6"],
        companion: None,
        places: Some(&PLACES),
        package: "a-package",
        since: "never",
        device: Device::Cuda(0),
    };

    impl Describe for Lengths {
        fn describe(&self, status: c_int) -> String {
            format!("{status} in words")
        }
    }

    impl Describe for Impossible {
        fn describe(&self, _: c_int) -> String {
            String::new()
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn functions_of_a_table_are_called() {
        let lengths = Lengths::get().unwrap();
        // SAFETY: functions of the C library, on a string and on numbers.
        unsafe {
            assert_eq!(lengths.strlen(c"four".as_ptr()), 4);
            assert!(lengths.abs(0).is_ok());
            let failure = lengths.abs(-3).unwrap_err();
            assert_eq!((failure.call, failure.status, &*failure.words), ("abs", 3, "3 in words"));
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_missing_function_is_an_error() {
        let message = Impossible::get().unwrap_err().to_string();
        assert!(message.contains("`windrow_has_no_such_function`, which never"), "{message}");
    }

    #[test]
    fn a_directory_without_the_library_is_passed_over() {
        let dir = std::env::temp_dir().join(format!("windrow-library-{}", std::process::id()));
        assert!(load_newest(&dir, "libx.so").is_none(), "no directory");
        std::fs::create_dir_all(&dir).unwrap();
        assert!(load_newest(&dir, "libx.so").is_none(), "empty directory");
        std::fs::write(dir.join("libx.so.13"), b"not a library").unwrap();
        assert!(load_newest(&dir, "libx.so").is_none(), "not a library");
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn versions_are_compared_as_numbers() {
        let mut names = ["x.so", "x.so.12", "x.so.9", "x.so.13.0.48", "x.so.13", "x.so.12.9"];
        names.sort_by_cached_key(|name| version_of(Path::new(name), "x.so"));
        assert_eq!(names, ["x.so", "x.so.9", "x.so.12", "x.so.12.9", "x.so.13", "x.so.13.0.48"]);
    }

    #[test]
    fn what_is_missing_says_how_to_get_it() {
        let driver = Library { places: None, package: "", ..LIBC };
        assert!(matches!(driver.error(&Absent::NotFound), Error::NoDevice { .. }));
        assert!(matches!(driver.error(&Absent::Without("f")), Error::NoDevice { .. }));
        let error = LIBC.error(&Absent::NotFound);
        assert!(matches!(error, Error::Backend { .. }));
        let message = error.to_string();
        assert!(message.contains("pip install a-package") && message.contains("TEST_PATH"));
        let runtime = Library { package: "", ..LIBC };
        let error = runtime.error(&Absent::NotFound);
        assert!(matches!(error, Error::NoDevice { .. }) && !error.to_string().contains("pip"));
    }
}
