//! Parameter structures of kernels, declared by the host and compared with the device's by the compiler.

/// A field, or several of one type that the device names one by one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Field {
    pub(crate) names: &'static [&'static str],
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
}

/// A structure that a kernel takes as its one argument.
///
/// # Safety
/// It must be `repr(C)`, and begin with these fields and no others.
pub(crate) unsafe trait Params: 'static {
    const FIELDS: &'static [Field];
}

/// Declares structures that kernels take. Fields are named as in the `.cu` file, or an array says which fields there
/// are its elements.
macro_rules! params {
    (@names $field:ident) => { &[stringify!($field)] };
    (@names $field:ident $($part:ident),+) => { &[$(stringify!($part)),+] };
    ($(
        $(#[$about:meta])*
        $vis:vis struct $name:ident {
            $($(#[$note:meta])* $seen:vis $field:ident $(as [$($part:ident),+])?: $type:ty,)*
        }
    )*) => {$(
        $(#[$about])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        $vis struct $name { $($(#[$note])* $seen $field: $type,)* }

        // SAFETY: as declared above.
        unsafe impl $crate::gpu::Params for $name {
            const FIELDS: &'static [$crate::gpu::Field] = &[
                $($crate::gpu::Field {
                    names: params!(@names $field $($($part),+)?),
                    offset: std::mem::offset_of!($name, $field),
                    bytes: size_of::<$type>(),
                },)*
            ];
        }
    )*};
}
pub(crate) use params;

/// Name, offset and bytes of each field as the device names them.
pub(super) fn elements(
    fields: &'static [Field],
) -> impl Iterator<Item = (&'static str, usize, usize)> {
    fields.iter().flat_map(|&Field { names, offset, bytes }| {
        let bytes = bytes / names.len();
        names.iter().enumerate().map(move |(i, name)| (*name, offset + i * bytes, bytes))
    })
}

/// True, in C++ with the backend's `OFFSET_OF(structure, field)`, if the structure of this name has these fields (name, offset, bytes) and so many bytes.
pub(super) fn agreement(
    name: &str,
    fields: impl Iterator<Item = (&'static str, usize, usize)>,
    bytes: usize,
) -> String {
    let mut all = format!("(sizeof({name})=={bytes}");
    for (field, offset, bytes) in fields {
        all += &format!("&&OFFSET_OF({name},{field})=={offset}");
        all += &format!("&&sizeof({name}::{field})=={bytes}");
    }
    all + ")"
}

#[cfg(test)]
mod tests {
    use crate::gpu::{KernelSpec, Source, compile_tests};

    params! {
        struct Pair {
            x: *const u8,
            strides: [i64; 2],
            size as [h, w]: [i32; 2],
        }
    }

    /// A kernel whose structure has these fields.
    fn source(fields: &str) -> &'static Source {
        let text = format!(
            "struct Params {{ {fields} }};
            static_assert(PARAMS_AGREE, \"as the host's structure\");
            extern \"C\" __global__ void KERNEL(Params p) {{}}"
        );
        Box::leak(Box::new(Source { name: "pair.cu", text: text.leak(), includes: &[] }))
    }

    #[test]
    fn structures_that_differ_do_not_compile() {
        let message = |fields: &str| {
            compile_tests::message(&KernelSpec::new(source(fields), "pair").params::<Pair>())
        };
        let Some(none) = message("const char *x; long long strides[2]; int h, w;") else { return };
        assert_eq!(none, "");
        for fields in [
            "const char *x; long long strides[2]; int h, w, more;",
            "const char *y; long long strides[2]; int h, w;",
            "const char *x; long long strides[2]; int w, h;",
            "long long strides[2]; const char *x; int h, w;",
            "const char *x; long long strides[1]; long long more; int h, w;",
            "const char *x; long long strides[2]; long long h;",
        ] {
            let message = message(fields).unwrap();
            assert!(message.contains("error"), "{fields}: {message}");
        }
    }
}
